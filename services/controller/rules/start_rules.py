"""Rules for a generation that hosts could not start: a missing file, a full disk, a port in use.

Blame a host before the job: a failure on one host is that host's, until another host fails alike. Its ranks go to a
spare, and it gets no work until an operator releases it. If all hosts fail (a missing share), wait. If the cause is
Flyball's own (a port race), retry. None of this counts against --max-restarts.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionState, DecisionKind, FailedStart, Incident
from flyball.contracts.errors import FlyballError, PortInUse, StaleCommand, StorageFull, Unreachable
from flyball.contracts.reports.signals import STORE_ENDED
from services.controller.round import diagnosis, guardrails, plans
from services.controller.round.diagnosis import WORKER_START_FAILED
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import GenerationView
from services.controller.rules import recovery_rules
from services.rules.incident_states import HostEvent
from services.rules.wording import listed

# Flyball's own failures, also of a daemon: a dead spawner, an exception, a late answer.
_OURS = frozenset(
    {PortInUse.code, STORE_ENDED, StaleCommand.code, Unreachable.code, FlyballError.code}
    | {"interrupted", "superseded", "spawn_failed", "timed_out"}
)
_OURS_TIMES = 3  # in a row on one host; after that, blame the host
_ASK_AGAIN_S = 1.0  # a spare may appear
_LONG_BACK_OFF_S = 45.0  # once patience is over


def note_failed_starts(round_: Round, incident: Incident, generation: GenerationView) -> None:
    """Add to an incident the hosts that could not start the current generation, or had no room left even for the order
    to stop the previous one. If several hosts fail alike, no host is to blame: cordoned ones may have work again."""
    known = {(start.host_id, start.code): start for start in incident.failed_starts}
    # Failures belong to one row if no more than the longest pause and the longest attempt lie between them.
    settings = round_.settings_of(round_.jobs[incident.job].spec)
    row_s = max(settings.start_patience_s, _LONG_BACK_OFF_S + settings.action_deadline_s)
    for key in _failed(round_, incident, generation):
        before = known.get(key)
        if before is not None and before.generation >= generation.generation:
            continue
        if before is None or 0.0 < before.last_at < round_.now - row_s:
            known[key] = FailedStart(*key, generation.generation, first_at=round_.now, last_at=round_.now)
        else:
            again = {"generation": generation.generation, "times": before.times + 1, "last_at": round_.now}
            known[key] = msgspec.structs.replace(before, **again)
    if not known:
        return
    incident = round_.advance(incident, None, failed_starts=tuple(known.values()))
    for start in incident.failed_starts:
        host = round_.hosts.get(start.host_id)
        if host is None or host.state is not HostState.CORDONED or host.is_leaving or _is_ours(start):
            continue
        if _is_alike(start, incident) and not _is_well_elsewhere(generation, incident):
            reason = f"other hosts cannot start job {incident.job} either ({start.code}): it may have work again"
            why = f"{host.host_id}: {reason}."
            round_.decide_host(host.host_id, DecisionKind.UNCORDON, "give_back_what_is_not_to_blame", why)
            round_.change_host(host.host_id, HostEvent.RELEASED, reason)


def _failed(round_: Round, incident: Incident, generation: GenerationView) -> list[tuple[str, str]]:
    """The failed hosts and their error codes, as far as this round knows."""
    found: list[tuple[str, str]] = []
    if incident.generation == generation.generation:
        failures = diagnosis.failed_starts(round_.actions.values(), incident.job, generation, round_.now)
        failures += [f for f in round_.reported.get(incident.job, []) if f.cause == WORKER_START_FAILED]
        found += [(failure.host_id, failure.error_kind) for failure in failures]
    action = round_.actions.get(incident.action_id)
    if action is not None and action.phase == "stop" and action.state is ActionState.FAILED:
        found += [(host_id, code) for host_id, (code, _) in action.failed.items() if code == StorageFull.code]
    return found


def wait_for_the_other_starts(case: Case) -> Verdict | None:
    """Wait a moment to see whether other hosts fail alike."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None or generation.started_at == 0.0:
        return None
    if all(_is_ours(start) for start in _here(case)):
        return None
    answered = {rank.host_id for rank in generation.ranks} | {start.host_id for start in _here(case)}
    missing = [part.host_id for part in generation.hosts if part.host_id not in answered]
    until = incident.since + case.settings.root_cause_window_s
    if not missing or case.now >= until:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} Waiting up to {until - case.now:.1f} s to see whether {listed(missing)} can start.",
        holding_for=f"a report of {listed(missing)}",
        hold_until=until,
    )


def leave_a_host_that_cannot_start(case: Case) -> Verdict | None:
    """Move its ranks to a host that has not failed like this, and cordon it until an operator releases it."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None:
        return None
    failed = [start for start in _here(case) if not _is_ours(start)]
    everywhere = not _is_well_elsewhere(generation, incident) and all(_is_alike(s, incident) for s in failed)
    if not failed or (everywhere and len(failed) > 1):
        return None
    names = tuple(dict.fromkeys(start.host_id for start in failed))
    # No start was sent yet: even the order to stop found no room, not even in the reserve (docs/decisions/0038).
    given_up = names if generation.started_at == 0.0 else ()
    if given_up and plans.loses_without(case, generation, given_up):
        return None  # a person must make room there
    tried = {start.host_id for start in incident.failed_starts}
    verdict = recovery_rules.move(case, names, avoid=tried, given_up=given_up)
    if verdict is None:
        return None
    blame = "" if everywhere else f" {listed(names)} gets no work until an operator releases it."
    return Verdict(
        verdict.kind,
        f"{verdict.reason}{blame}",
        plan=verdict.plan,
        evidence=verdict.evidence,
        cordons=() if everywhere else names,
        is_patient=True,
    )


def fail_what_starts_nowhere(case: Case) -> Verdict | None:
    """Fail a job that no host can start, when patience is over. While a host is left that might, wait."""
    here, incident, generation = _here(case), case.incident, case.job.generation
    if not here or incident is None or generation is None or not _is_overdue(case, here):
        return None
    codes = {start.code for start in here}  # other failures of earlier attempts may be mended by now
    tried = {start.host_id for start in incident.failed_starts if start.code in codes}
    is_alike = any(_is_alike(start, incident) for start in here) and not _is_well_elsewhere(generation, incident)
    others = [host for host in _others(case) if host not in tried]
    if others and not is_alike:
        return None
    waited_s = case.now - min(start.first_at for start in here)
    where = "on no other host either" if is_alike else "and there is no other host"
    reason = f"{incident.message} It was tried for {waited_s:.0f} s, {where}."
    return recovery_rules.fail(case, reason, {"tried": ",".join(sorted(tried))})


def start_again(case: Case) -> Verdict | None:
    """Restart in place after a growing pause: a share comes back, a disk gets room, the next port is free."""
    here, incident = _here(case), case.incident
    if not here or incident is None:
        return None
    times = max(start.times for start in here)
    pause_s = _LONG_BACK_OFF_S if _is_overdue(case, here) else guardrails.back_off_s(times)
    until = incident.since + pause_s
    if case.now < until:
        return Verdict(
            DecisionKind.HOLD,
            f"{incident.message} The next attempt is in {until - case.now:.1f} s.",
            evidence={"times": times},
            holding_for=f"some time to pass after start {times} failed",
            hold_until=min(until, case.now + _ASK_AGAIN_S),
        )
    again = recovery_rules.restart_in_place(case)
    return Verdict(again.kind, again.reason, plan=again.plan, evidence=again.evidence, is_patient=True)


def _here(case: Case) -> list[FailedStart]:
    """The failed starts of the current generation, if the incident is about them now."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None:
        return []
    if incident.generation == generation.generation and incident.cause != WORKER_START_FAILED:
        return []  # it started, and failed in another way
    return [start for start in incident.failed_starts if start.generation == generation.generation]


def _is_well_elsewhere(generation: GenerationView, incident: Incident) -> bool:
    """Whether a host has started its ranks of the generation, or accepted the order to. Then the failure is not
    everywhere."""
    failed = {start.host_id for start in incident.failed_starts if start.generation == generation.generation}
    if generation.started_at == 0.0:
        return any(part.host_id not in failed for part in generation.hosts)
    return any(rank.host_id not in failed for rank in generation.ranks)


def _others(case: Case) -> list[str]:
    """Hosts that could take the ranks one day, also busy and silent ones."""
    named = case.job.spec.hosts
    return [
        host.host_id for host in case.round.hosts.values() if not host.left_at and (not named or host.host_id in named)
    ]


def _is_alike(start: FailedStart, incident: Incident) -> bool:
    return any(o.host_id != start.host_id and o.code == start.code for o in incident.failed_starts)


def _is_ours(start: FailedStart) -> bool:
    return start.code in _OURS and start.times <= _OURS_TIMES


def _is_overdue(case: Case, here: list[FailedStart]) -> bool:
    return case.now >= min(start.first_at for start in here) + case.settings.start_patience_s
