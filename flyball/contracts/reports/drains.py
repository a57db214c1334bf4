"""Hosts that are to be left: what operators want, and what a daemon that was told to end waits for."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec


class DrainState(StrEnum):
    """What became of an operator's wish that a host be left."""

    REQUESTED = "requested"  # stands until it is cancelled: no rank stays, and none comes
    REFUSED = "refused"  # its ranks could not be moved in time, and are where they were
    CANCELLED = "cancelled"  # the host may have work again


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator asks for: leave this host, or leave it as it is if no other is free within `within_s`."""

    within_s: Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)] = 300.0
    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""


class Departure(msgspec.Struct, frozen=True):
    """Whether a host that gave notice is needed no more: its ranks are elsewhere, and train there."""

    may_leave: bool
    waits_for: str = ""  # in words, for the log
