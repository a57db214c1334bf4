"""What a host says of another: sensors ask the neighbours of a host that they hear nothing of."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flyball.contracts.identity import HostId

MAX_ASKED = 16  # hosts that one host is asked about at a time

Age = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Asked = Annotated[tuple[HostId, ...], msgspec.Meta(max_length=MAX_ASKED)]


class Testimony(msgspec.Struct, frozen=True):
    """That a peer is alive: its engine answers, and had then heard of the daemon beside it. Ages count back from the
    moment of the report; of a peer that does not answer there is none."""

    peer: HostId
    engine_s: Age  # since its engine last answered
    daemon_s: Age | None  # how old that engine's last word of its daemon was then; None: it had none


Testimonies = Annotated[tuple[Testimony, ...], msgspec.Meta(max_length=MAX_ASKED)]
