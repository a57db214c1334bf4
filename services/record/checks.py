"""The checks of hosts that a decision begins, for the SQL store and the simulator's. Pure."""

from __future__ import annotations

from flyball.contracts.decisions import Decision
from flyball.contracts.reports.host_checks import CheckState, HostCheck
from services.controller.round.view import CheckChange
from services.record.codec import number_of


def begun_by(decision: Decision) -> tuple[CheckChange, ...]:
    """A running check for each host that the decision has judged."""
    if decision.action is None or decision.action.check is None:
        return ()
    check = HostCheck(CheckState.RUNNING, decision.at, f"act-{number_of(decision.decision_id)}")
    return tuple(CheckChange(host.host_id, check) for host in decision.action.check.hosts if not host.is_helper)


def is_newest(known: HostCheck | None, change: CheckChange) -> bool:
    """Whether a result replaces what is stored: that may be a newer check."""
    return known is None or number_of(known.action_id) <= number_of(change.check.action_id)
