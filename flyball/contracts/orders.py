"""What operators order of the controller: cordon a host, keep silent about one, approve an action, save a checkpoint.

There is at most one order per (kind, target). It stands until the controller has carried it out, or it is over.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from flyball.contracts.identity import HostId, Moment

MAX_SILENCE_S: Final = 30 * 86_400.0
DOMAIN: Final = "domain:"  # begins the target of an order about a whole failure domain

Reason = Annotated[str, msgspec.Meta(max_length=500)]
Target = Annotated[str, msgspec.Meta(max_length=140)]


AWAITS_APPROVAL: Final = "an operator's approval of "  # begins what an incident holds for


class OrderKind(StrEnum):
    CORDON = "cordon"  # give the host no work; ranks that are there stay until their next restart
    SILENCE = "silence"  # a maintenance window: decide nothing because of this host or failure domain
    APPROVE = "approve"  # let the incident's next action be carried out
    CHECK = "check"  # measure a host without ranks; see `awaited`
    CHECKPOINT = "checkpoint"  # let all ranks of a job save a step now
    CLEAR = "clear"  # forget the failures of this host so far
    ADOPT = "adopt"  # supervise a job as its hosts run it, although nothing proves that this cluster started it


class OrderState(StrEnum):
    STANDING = "standing"
    REFUSED = "refused"
    OVER = "over"  # it is forgotten


class Order(msgspec.Struct, frozen=True):
    """One order. Moments are the wall clock of the API."""

    kind: OrderKind
    target: Target  # a host, "domain:NAME", an incident, or a job
    requested_at: Moment
    reason: Reason = ""
    until: Moment = 0.0  # when a silence is over, or a refused order is forgotten
    state: OrderState = OrderState.STANDING
    message: str = ""  # why it was refused
    awaited: str = ""  # an approval: of which kind of action; a check: "uncordon" if a host that passes gets work
    action_id: str = ""  # an approval: the incident's last action when it was given

    @property
    def key(self) -> tuple[OrderKind, str]:
        return self.kind, self.target


class CordonRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give a host no work."""

    reason: Reason


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measure hosts together."""

    hosts: Annotated[tuple[HostId, ...], msgspec.Meta(min_length=1, max_length=4096)]
    reason: Reason = ""


class SilenceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decide nothing because of a host, or of a failure domain, for some time. `for_s` 0: the silence is over."""

    for_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SILENCE_S)]
    host_id: Annotated[str, msgspec.Meta(max_length=64)] = ""
    failure_domain: Annotated[str, msgspec.Meta(max_length=128)] = ""
    reason: Reason = ""


class ApproveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let the action that an incident waits for be carried out. `target`: the incident, or a decision about it."""

    target: Annotated[str, msgspec.Meta(pattern=r"\A(dec|inc)-[0-9]{1,18}\Z")]
    reason: Reason = ""


class AdoptRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Supervise a job as its hosts run it."""

    reason: Reason = ""


class CheckpointRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let all ranks of a job save a step now."""

    reason: Reason = ""
