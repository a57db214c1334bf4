"""Plans a check of hosts, and reads what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from flyball.contracts.cluster import JobSpec
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, HostCheckPlan, HostToCheck
from flyball.contracts.reports.host_checks import CheckState, HostCheck
from services.controller.round.view import ActionView, HostView
from services.rules import preflight

MAX_HELPERS = 4
NO_JOB = JobSpec(job="none", argv=(), workdir="/")  # of a check that is made for no job
_ROUND_MARGIN_S = 12.0  # for commands and answers, on top of a round's own time
_STOP_S = 30.0


def check_plan(
    hosts: Sequence[HostView],
    helpers: Sequence[HostView],
    *,
    timeout_s: float,
    spec: JobSpec | None = None,
    generation: int = 0,
    stops: bool = False,
) -> ActionPlan:
    """Check `hosts`; `helpers` are not judged. With `stops`, the generation is stopped first."""
    checked = [(host, False) for host in hosts] + [(host, True) for host in helpers[:MAX_HELPERS]]
    rounds_s = preflight.MAX_ROUNDS * (timeout_s + _ROUND_MARGIN_S)
    return ActionPlan(
        kind=DecisionKind.CHECK_HOSTS,
        job=spec.job if spec is not None else "",
        spec=spec or NO_JOB,
        generation=generation,
        stop_hosts=tuple(host.host_id for host in hosts),  # they get no other work meanwhile; helpers may
        deadline_s=rounds_s + (_STOP_S if stops else 0.0),
        check=HostCheckPlan(
            hosts=tuple(
                HostToCheck(host.host_id, host.address, host.free_port, is_helper) for host, is_helper in checked
            ),
            timeout_s=timeout_s,
            stops=stops,
        ),
    )


def results(action: ActionView, now: float) -> dict[str, HostCheck]:
    """The checks of the hosts that an action has judged; helpers are among them if it is known how they are. An action
    that was broken off shows nothing."""
    plan = action.plan.check
    judged = [host.host_id for host in plan.hosts if not host.is_helper] if plan is not None else []
    measured = {measure.host_id for measure in action.checks}
    if action.state is not ActionState.SUCCEEDED:
        why = f"its check ended {action.state.value}{f': {action.message}' if action.message else ''}"
        return {host: HostCheck(CheckState.UNKNOWN, now, action.action_id, message=why) for host in judged}
    hosts = [*judged, *sorted(measured.difference(judged))]
    found = preflight.judge(hosts, preflight.answers_of(judged, action.checks, action.unmeasured))
    return {
        host: HostCheck(
            finding.state,
            now,
            action.action_id,
            finding.devices,
            finding.matmul_s,
            finding.all_reduce_s,
            finding.message,
        )
        for host, finding in found.items()
        if host in judged or finding.state is not CheckState.UNKNOWN
    }


def is_running(host: HostView) -> bool:
    """Whether the host is being checked."""
    return host.check is not None and host.check.state is CheckState.RUNNING
