"""What a rule decides."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import ActionPlan, Alternative, DecisionKind, Incident
from services.controller.round.view import PastFailure

Evidence = Mapping[str, str | int | float | bool | None]


class Verdict(msgspec.Struct, frozen=True):
    """A rule's decision. Without a plan it is a hold: it waits for `holding_for`, at most until `hold_until`."""

    kind: DecisionKind
    reason: str
    plan: ActionPlan | None = None
    evidence: Evidence = {}
    holding_for: str = ""
    hold_until: float = 0.0
    awaits_news: bool = False  # only a change of the view ends this hold, no moment: no round is due for it
    job_state: JobState | None = None  # the job's new state: its end begins
    gives_up: bool = False  # the incident escalates
    settles: PastFailure | None = None  # nothing is to be done: the incident is over, and the job's record says why
    notes: PastFailure | None = None  # an entry for the job's record
    cordons: tuple[str, ...] = ()  # hosts that get no work until an operator releases them
    is_patient: bool = False  # does not count against the incident's limit of decisions
    refuses_drain_of: str = ""  # a host whose drain is refused
    alternatives: tuple[Alternative, ...] = ()

    def is_in_force(self, incident: Incident) -> bool:
        """Whether this is a hold that the incident is in already."""
        return self.is_hold and incident.holding_for == self.holding_for

    @property
    def is_hold(self) -> bool:
        """Whether the incident waits."""
        return self.plan is None and not self.gives_up and self.settles is None
