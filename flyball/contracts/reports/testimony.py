"""A host's report about another: sensors ask the neighbours of a host that they receive nothing from."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flyball.contracts.identity import HostId

MAX_ASKED = 16  # hosts that one host is asked about at a time

Age = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Asked = Annotated[tuple[HostId, ...], msgspec.Meta(max_length=MAX_ASKED)]


class Testimony(msgspec.Struct, frozen=True):
    """A peer is alive: its engine answers. Ages count back from the time of the report; a peer that does not answer has
    no testimony."""

    peer: HostId
    engine_s: Age  # since its engine last answered
    daemon_s: Age | None  # age of the daemon's last message to that engine at that moment; None: no message yet


Testimonies = Annotated[tuple[Testimony, ...], msgspec.Meta(max_length=MAX_ASKED)]
