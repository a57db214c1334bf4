"""The seal of a start command: it shows later that this cluster gave a host exactly this (docs/decisions/0044)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flyball.contracts.identity import Epoch, Generation, RunId

Digest = Annotated[str, msgspec.Meta(max_length=64)]


class GrantSeal(msgspec.Struct, frozen=True):
    """Only who has the cluster's secret can make `mac`. A daemon keeps the seal with what it obeyed, and returns it.

    It proves that the command was given, not that the job still lives.
    """

    run: RunId = ""  # generations are counted anew with a run that nobody remembers
    generation: Generation = -1
    epoch: Epoch = 0  # of the command's fence
    part: Digest = ""  # of the specification and the host's part of the placement
    whole: Digest = ""  # of the whole placement; the same on all its hosts
    mac: Digest = ""  # over all of these, the job and the host; '': not sealed, as by an older release
