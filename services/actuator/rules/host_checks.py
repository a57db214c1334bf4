"""The rounds of a check of hosts: the groups of each, and what their answers say. Pure."""

from __future__ import annotations

import msgspec

from flyball.contracts.decisions import CheckHost, HostCheckPlan, HostToCheck, UpdateState
from flyball.contracts.reports.host_checks import CheckState
from services.actuator.ports import ActionProgress, CommandDraft, OutboxCommand, PlaybookStep
from services.actuator.rules.moves import drafts, end, move, names
from services.rules import preflight
from services.rules.incident_states import ACTION, ActionEvent

CHECK = preflight.PHASE
# Which network the ranks of a job use: without these, a check may take another one, and fail on good hosts.
_NETWORK_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_")
_FINAL = (UpdateState.SUCCEEDED, UpdateState.FAILED, UpdateState.REFUSED)


def begin(progress: ActionProgress, plan: HostCheckPlan, now: float) -> PlaybookStep:
    """The first round."""
    state = progress.state if progress.phase else ACTION.advance(progress.state, ActionEvent.BEGAN)
    groups = preflight.next_groups(*_named(plan), ())
    asking = _asking(progress, plan, 1, groups, now)
    return move(progress, CHECK, state, asking, message=_doing(1, groups), now=now)


def advance(progress: ActionProgress, plan: HostCheckPlan, now: float) -> PlaybookStep:
    """Wait for the answers of a round; then the next one, or the end. A host that does not answer has failed; one whose
    daemon refuses is not known."""
    sent = [record for record in progress.commands if isinstance(record.command.body, CheckHost)]
    updates = [record.update for record in sent if record.update is not None]
    measures = [update.result.check for update in updates if update.result.check is not None]
    given_up = preflight.given_up(measures)
    waiting = [
        record
        for record in sent
        if record.state not in _FINAL and now < progress.answer_due(record) and _group(record) not in given_up
    ]
    if waiting and now < progress.deadline_at:
        wake_at = max(now, min(*map(progress.answer_due, waiting), progress.deadline_at))
        return PlaybookStep(CHECK, progress.state, attempt=progress.attempt, wake_at=wake_at)
    hosts, helpers = _named(plan)
    answers = preflight.answers_of(hosts, measures, preflight.without_measure(updates))
    is_over = now >= progress.deadline_at or progress.attempt >= preflight.MAX_ROUNDS
    groups = () if is_over else preflight.next_groups(hosts, helpers, answers)
    if not groups:
        return end(progress, ActionEvent.COMPLETED, _summary(preflight.judge(hosts, answers)))
    following = progress.attempt + 1
    asking = _asking(progress, plan, following, groups, now)
    step = move(progress, CHECK, progress.state, asking, message=_doing(following, groups), now=now)
    return msgspec.structs.replace(step, attempt=following)


def _named(plan: HostCheckPlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts to judge, and the helpers."""
    judged = tuple(host.host_id for host in plan.hosts if not host.is_helper)
    return judged, tuple(host.host_id for host in plan.hosts if host.is_helper)


def _group(record: OutboxCommand) -> tuple[int, tuple[str, ...]]:
    body = record.command.body
    return (body.round, body.group) if isinstance(body, CheckHost) else (0, ())


def _asking(
    progress: ActionProgress, plan: HostCheckPlan, round_: int, groups: tuple[tuple[str, ...], ...], now: float
) -> tuple[CommandDraft, ...]:
    known = {host.host_id: host for host in plan.hosts}
    bodies = []
    for number, group in enumerate(groups):
        first = known[group[0]]
        body = CheckHost(
            job=progress.plan.job,
            check_id=f"{progress.action_id}.{round_}.{number}",
            round=round_,
            group=group,
            master_address=first.address,
            master_port=_port(progress, first),
            timeout_s=plan.timeout_s,
            env=_network_of(progress),
        )
        bodies += [(host, body) for host in group]
    return tuple(drafts(progress, CHECK, bodies, now))


def _network_of(progress: ActionProgress) -> dict[str, str]:
    if not progress.plan.job:
        return {}
    spec = progress.plan.spec
    return {name: value for name, value in {**spec.user_env, **spec.env}.items() if name.startswith(_NETWORK_PREFIXES)}


def _port(progress: ActionProgress, host: HostToCheck) -> int:
    """The newest port that the host found free."""
    offered = (
        record.update.result.free_port
        for record in reversed(progress.commands)
        if record.command.host_id == host.host_id and record.update is not None
    )
    return next(filter(None, offered), host.free_port)


def _doing(round_: int, groups: tuple[tuple[str, ...], ...]) -> str:
    shown = "; ".join(names(group) for group in groups[:8])
    more = f" and {len(groups) - 8} more groups" if len(groups) > 8 else ""
    return f"checking hosts, round {round_}: {shown}{more}"


def _summary(found: dict[str, preflight.HostFinding]) -> str:
    parts = []
    for state, verb in (
        (CheckState.FAILED, "failed"),
        (CheckState.UNKNOWN, "could not be told from a bad host"),
        (CheckState.SLOW, "passed, but slow"),
        (CheckState.PASSED, "passed"),
    ):
        hosts = [host for host, finding in found.items() if finding.state is state]
        if hosts:
            parts.append(f"{names(hosts)} {verb}")
    return "; ".join(parts)
