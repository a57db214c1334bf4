"""Draining hosts: the operator's request, and what a terminating daemon waits for."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec


class DrainState(StrEnum):
    """The state of an operator's request to drain a host."""

    REQUESTED = "requested"  # stands until cancelled: ranks leave, and no new ones come
    REFUSED = "refused"  # its ranks could not be moved in time, and stay
    CANCELLED = "cancelled"  # the host may get work again


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operator's request: drain this host, but leave it as it is if no other host is free within `within_s`."""

    within_s: Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)] = 300.0
    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""


class Departure(msgspec.Struct, frozen=True):
    """Whether a host that gave notice may leave: its ranks have moved and train elsewhere."""

    may_leave: bool
    waits_for: str = ""  # in words, for the log
