"""Updates incidents with the events since the last round, and diagnoses new failures. Decides nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from flyball.contracts.cluster import HostState, JobState, Phase
from flyball.contracts.decisions import ActionState, DecisionKind, Incident, IncidentState
from services.controller.round import diagnosis, given_up
from services.controller.round.diagnosis import (
    BESIDE_FAILURES,
    CHECKPOINT_REQUESTED,
    DEPARTURES,
    DRAIN_REQUESTED,
    HOST_SILENT,
    PREEMPTION_NOTICE,
    ROOM_TO_GROW,
    SAVES_FAILING,
    STRAGGLER,
    SUPERSEDED_WORKERS,
    Failure,
    newest_common_step,
)
from services.controller.round.guardrails import failures_within, is_another_fault, is_early, progress_of
from services.controller.round.round import Case, Round
from services.controller.round.view import ActionView, GenerationView, HostView, JobView, PastFailure, RankView
from services.controller.rules import (
    check_rules,
    checkpoint_rules,
    grow_rules,
    hang_rules,
    health_rules,
    preemption_rules,
    save_rules,
    start_rules,
    straggler_rules,
)
from services.controller.updates import host_conditions, unreported
from services.controller.updates.unreported import ASK_AGAIN_S, REPORTED_WITHIN_S, is_known_since, pending_failure
from services.rules.incident_states import IncidentEvent
from services.rules.wording import explained

_STALE_AFTER_S = 2.0  # older workers in a report this long after the start are strays
_CLEAN_WITHIN_S = 15.0
_CARRIED_OUT = (ActionState.SUCCEEDED, ActionState.FAILED, ActionState.TIMED_OUT)  # as far as they will be
_ENDED_AFTER_S = 20.0  # as `_STALE_AFTER_S`, after a job's end: leaves time for its commands and its workers' grace


def follow(round_: Round, job: JobView) -> None:
    """Update the job's incidents from their actions, ranks and hosts."""
    for incident in round_.open_incidents(job.spec.job):
        if incident.cause == SUPERSEDED_WORKERS:
            _follow_stale_workers(round_, incident)
        elif incident.cause == SAVES_FAILING:
            save_rules.follow(round_, job, incident)
        elif incident.cause == STRAGGLER and incident.state is IncidentState.DECIDING:
            straggler_rules.follow(round_, job, incident)
        elif incident.cause == ROOM_TO_GROW and incident.state is IncidentState.DECIDING:
            grow_rules.follow(round_, job, incident)
        elif incident.cause == CHECKPOINT_REQUESTED and incident.state is IncidentState.DECIDING:
            checkpoint_rules.follow(round_, job, incident)
        elif incident.state is IncidentState.ACTING:
            _follow_action(round_, job, incident)
        elif incident.state is IncidentState.VERIFYING:
            _verify(round_, job, incident)
    host_conditions.leave_before_it_fails(round_, job)
    for incident in round_.open_incidents(job.spec.job):
        if incident.state is IncidentState.DECIDING:
            _clear(round_, job, incident)


def diagnose(round_: Round, job: JobView) -> None:
    """Diagnose the job's current generation, and open its incident or update the cause."""
    generation = job.generation
    if generation is None or job.state is not JobState.RUNNING:
        return
    failure = _find_failure(round_, job, generation)
    if failure is not None:
        round_.diagnoses[job.spec.job] = failure
        _record(round_, job, generation, failure)
    incident = health_rules.failure_of(round_, job.spec.job)
    if incident is not None:
        start_rules.note_failed_starts(round_, incident, generation)
    _find_notices(round_, job, generation)
    _find_drains(round_, job, generation)
    host_conditions.find(round_, job, generation)
    grow_rules.find(round_, job, generation)
    _find_stale_workers(round_, job, generation)


def find_left_behind(round_: Round, job: JobView) -> None:
    """For an ended job, find workers on hosts that did not get the command to stop."""
    for incident in round_.open_incidents(job.spec.job):
        if incident.cause == SUPERSEDED_WORKERS:
            _follow_stale_workers(round_, incident)
    if job.generation is not None:
        _find_stale_workers(round_, job, job.generation)


# --- following -------------------------------------------------------------------------------------------------------


def _follow_action(round_: Round, job: JobView, incident: Incident) -> None:
    action = round_.actions.get(incident.action_id)
    if action is not None and action.plan.kind is DecisionKind.RESUME and action.state in _CARRIED_OUT:
        # A host that did not answer may have had no parked ranks, or obeyed: steps show whether the ranks went on.
        stood_at = max(incident.failed_step, action.plan.emergency_step)
        round_.advance(incident, IncidentEvent.ACTION_SUCCEEDED, failed_step=stood_at, lost_steps=0)
    elif action is None or action.state in (ActionState.FAILED, ActionState.TIMED_OUT):
        round_.advance(incident, IncidentEvent.ACTION_FAILED, failed_step=_failed_step(incident, action))
    elif action.state is ActionState.SUPERSEDED:
        round_.advance(incident, IncidentEvent.SUPERSEDED, failed_step=_failed_step(incident, action))
    elif action.state is ActionState.SUCCEEDED and action.plan.kind is DecisionKind.EMERGENCY_CHECKPOINT:
        round_.advance(incident, IncidentEvent.SAVED)
    elif action.state is ActionState.SUCCEEDED and action.plan.kind is DecisionKind.TAKE_STACKS:
        hang_rules.take_in_stands(round_, job, incident, action)
    elif action.state is ActionState.SUCCEEDED and action.plan.kind is DecisionKind.CHECK_HOSTS:
        check_rules.take_in_check(round_, incident, action)
    elif action.state is ActionState.SUCCEEDED:
        failed = _failed_step(incident, action)
        restored = -1 if action.restore_step is None else action.restore_step
        event, lost = IncidentEvent.ACTION_SUCCEEDED, max(0, failed - restored)
        round_.advance(incident, event, failed_step=failed, restored_step=restored, lost_steps=lost)
    elif _waits_for_the_silent(round_, job, action):
        round_.advance(incident, IncidentEvent.FAILED_AGAIN, failed_step=_failed_step(incident, action))


def _waits_for_the_silent(round_: Round, job: JobView, action: ActionView) -> bool:
    """Whether a host that must stop its workers fell silent. The present generation's hosts are diagnosed with it."""
    if action.plan.next is None or action.phase not in ("", "stop"):
        return False
    present = {part.host_id for part in job.generation.hosts} if job.generation else set()
    return any(round_.is_silent(host_id) for host_id in action.plan.stop_hosts if host_id not in present)


def _failed_step(incident: Incident, action: ActionView | None) -> int:
    """Return the newest step that all ranks completed before the failure, from the answers of an action's hosts.

    The last steps of a lost host's ranks are unknown. They count like the slowest other rank, since ranks that train
    together wait for each other. So the number of lost steps is never too low.
    """
    if action is None or not action.positions or action.plan.next is None:
        return incident.failed_step
    return max(incident.failed_step, min(action.positions.values()))


def _verify(round_: Round, job: JobView, incident: Incident) -> None:
    """Resolve an incident once every rank has completed a step past the failed one. Live processes do not suffice."""
    generation = job.generation
    if generation is None:
        return
    if generation.started_at == 0.0:
        if not any(round_.open_actions(job.spec.job)) and not _obeys_another(round_, job, incident):
            round_.advance(incident, IncidentEvent.VERIFY_OVERDUE)  # whoever granted it has given it up
        return
    threshold = max(incident.failed_step, incident.restored_step)
    is_whole = len(generation.ranks) == job.spec.world_size
    ranks = generation.ranks if is_whole else ()
    stands = any(rank.phase is Phase.PARKED for rank in ranks)  # the detector does not watch parked ranks
    patience_s = round_.settings_of(job.spec).verify_deadline_s if is_whole and not stands else REPORTED_WITHIN_S
    if ranks and all(rank.step > threshold for rank in ranks):
        round_.advance(incident, IncidentEvent.STEPS_ADVANCED)
    elif threshold < 0 and ranks and all(diagnosis.shows_no_steps(rank) for rank in ranks):
        _watch_life(round_, job, incident, ranks)
    elif _obeys_another(round_, job, incident):
        round_.wake(round_.now + ASK_AGAIN_S)  # they train again, or did until that one: it sees to them
    elif not is_known_since(round_, generation, due := max(incident.since, generation.started_at) + patience_s):
        round_.wake(max(due, round_.now + ASK_AGAIN_S))
    elif ranks and all(rank.phase not in (Phase.STARTING, Phase.RESTORING, Phase.PARKED) for rank in ranks):
        # Long steps: the detector reports it if they stop.
        round_.wake(round_.now + round_.settings_of(job.spec).verify_deadline_s)
    elif not _waits_for_a_failure(round_, job, incident):
        round_.advance(incident, IncidentEvent.VERIFY_OVERDUE)


def _obeys_another(round_: Round, job: JobView, incident: Incident) -> bool:
    """Whether the generation is to start, or its ranks act or stand, for another incident, that began beside this."""
    generation = job.generation
    if generation is None:
        return False
    waits = generation.started_at == 0.0 or any(rank.phase is Phase.PARKED for rank in generation.ranks)
    return any(
        other.cause in BESIDE_FAILURES
        and other is not incident
        and (waits or other.state in (IncidentState.ACTING, IncidentState.VERIFYING))
        and preemption_rules.last_action(Case(round_, job, other)) is not None
        for other in round_.open_incidents(job.spec.job)
    )


def _waits_for_a_failure(round_: Round, job: JobView, incident: Incident) -> bool:
    """Whether a failure starts another generation, and not this incident. One that is verified waits for this one, if
    the ranks obey it."""
    failure = pending_failure(round_, job)
    if failure is None or failure == incident:
        return False
    obeys_this = preemption_rules.last_action(Case(round_, job, incident)) is not None
    return failure.state is not IncidentState.VERIFYING or not obeys_this


def _watch_life(round_: Round, job: JobView, incident: Incident, ranks: Sequence[RankView]) -> None:
    """Resolve the incident of a script that does not attach, or has not yet, once its workers have run for a while."""
    due = incident.since + round_.settings_of(job.spec).unwatched_verify_s
    if round_.now >= due and all(rank.reported_at >= incident.since for rank in ranks):
        round_.advance(incident, IncidentEvent.STEPS_ADVANCED)
    else:
        round_.wake(max(due, round_.now + ASK_AGAIN_S))


def _clear(round_: Round, job: JobView, incident: Incident) -> None:
    """Close an incident whose cause went away by itself."""
    generation = job.generation
    if generation is None:
        return
    if incident.cause in DEPARTURES:
        action = round_.actions.get(incident.action_id)
        stands = preemption_rules.last_action(Case(round_, job, incident)) is not None
        migrates = stands and action is not None and action.plan.next is not None  # that action will end it
        is_left = all(part.host_id != incident.host_id for part in generation.hosts)
        # A drained host may have to take its ranks back until they train elsewhere.
        may_return = incident.cause == DRAIN_REQUESTED and health_rules.first_to_handle(round_, job) is not None
        is_over = is_left and not migrates and not (may_return and preemption_rules.is_wanted(round_, incident))
        if is_over or (not stands and not preemption_rules.is_wanted(round_, incident)):
            round_.advance(incident, IncidentEvent.CLEARED)
    elif health_rules.is_left_behind(incident, generation):
        round_.advance(incident, IncidentEvent.CLEARED)
    elif incident.cause == HOST_SILENT and incident.generation == generation.generation:
        is_whole = len(generation.ranks) == job.spec.world_size
        if is_whole and not _silent_hosts(round_, generation) and _trains_on(round_, job, incident, generation):
            round_.advance(incident, IncidentEvent.CLEARED, lost_steps=0)


def _trains_on(round_: Round, job: JobView, incident: Incident, generation: GenerationView) -> bool:
    """Whether the ranks of hosts that were silent have trained on, or, where no steps can show it, have run on."""
    ranks = generation.ranks
    if diagnosis.shows_steps(generation):
        return all(
            rank.step > incident.failed_step and rank.exited is None and rank.reported_at > incident.since
            for rank in ranks
        )
    hosts = [round_.hosts[part.host_id] for part in generation.hosts if part.host_id in round_.hosts]
    returned_at = max((host.since for host in hosts), default=round_.now)
    runs_on = all(diagnosis.is_done(rank) or (rank.exited is None and rank.reported_at > returned_at) for rank in ranks)
    return runs_on and round_.now >= returned_at + round_.settings_of(job.spec).unwatched_verify_s


def _follow_stale_workers(round_: Round, incident: Incident) -> None:
    host = round_.hosts.get(incident.host_id)
    if host is None or host.state is HostState.SILENT or incident.job not in host.stale_jobs:
        round_.advance(incident, IncidentEvent.CLEARED)
        return
    action = round_.actions.get(incident.action_id)
    if incident.state is IncidentState.VERIFYING:
        round_.wake(incident.since + _CLEAN_WITHIN_S)
        if round_.now >= incident.since + _CLEAN_WITHIN_S:
            round_.advance(incident, IncidentEvent.VERIFY_OVERDUE)
    elif incident.state is IncidentState.ACTING and (action is None or action.state.ended):
        succeeded = action is not None and action.state is ActionState.SUCCEEDED
        round_.advance(incident, IncidentEvent.ACTION_SUCCEEDED if succeeded else IncidentEvent.ACTION_FAILED)


# --- diagnosing ------------------------------------------------------------------------------------------------------


def _find_failure(round_: Round, job: JobView, generation: GenerationView) -> Failure | None:
    failures = [diagnosis.exit_failure(rank, generation) for rank in generation.ranks]
    failures.append(diagnosis.silence_failure(_silent_hosts(round_, generation), generation))
    failures.append(diagnosis.restart_failure(generation, round_.now))
    failures += diagnosis.failed_starts(round_.actions.values(), job.spec.job, generation, round_.now)
    failures += round_.reported.get(job.spec.job, [])
    found = diagnosis.root_cause(failure for failure in failures if failure is not None)
    return found or unreported.failure(round_, job, generation)


def _silent_hosts(round_: Round, generation: GenerationView) -> list[HostView]:
    hosts = [round_.hosts[part.host_id] for part in generation.hosts if part.host_id in round_.hosts]
    return [host for host in hosts if host.state is HostState.SILENT and not host.silenced_until]


def _record(round_: Round, job: JobView, generation: GenerationView, failure: Failure) -> None:
    """Open the job's incident, reopen it for a newer generation, or update its cause."""
    incident = health_rules.failure_of(round_, job.spec.job)
    facts: dict[str, Any] = {
        "cause": failure.cause,
        "message": failure.message,
        "host_id": failure.host_id,
        "generation": generation.generation,
    }
    if failure.harm is not None or incident is None or incident.generation < generation.generation:
        facts["harm"] = failure.harm  # a later failure of the same generation does not undo a harm
    if incident is None:
        round_.open_incident(
            job=job.spec.job,
            fault_at=failure.at - failure.quiet_s,
            observed_at=failure.at,
            failed_step=newest_common_step(generation),
            **facts,
        )
    elif incident.generation < generation.generation:
        failed = max(incident.failed_step, newest_common_step(generation))
        facts["failed_step"] = failed
        if progress_of(generation, round_.settings_of(job.spec)):  # the last decision worked
            facts |= {"decisions_made": 0, "decisions_before": 0, "failed_starts": ()}
        elif is_another_fault(failure.record, failures_within(incident, job)):
            facts |= {"decisions_made": 0, "decisions_before": incident.decisions_before + incident.decisions_made}
        round_.advance(incident, IncidentEvent.FAILED_AGAIN, **facts)
    elif incident.state is IncidentState.DECIDING and health_rules.replaces(failure, incident):
        round_.advance(incident, None, **facts)
    else:
        return
    record = failure.record
    if not failure.is_step_known and not is_early(failure, generation, round_.settings_of(job.spec)):
        record = PastFailure(record.generation, record.cause, "", "", record.step, record.host_id)
    round_.change_job(job.spec.job, job.state, job.message, record)


def _find_notices(round_: Round, job: JobView, generation: GenerationView) -> None:
    known = {i.host_id for i in round_.open_incidents(job.spec.job) if i.cause == PREEMPTION_NOTICE}
    common = functools.cache(lambda: newest_common_step(generation))  # once for all hosts
    for part in generation.hosts:
        host = round_.hosts.get(part.host_id)
        if host is None or host.preempt_deadline_at == 0.0 or host.host_id in known:
            continue
        if host.state in (HostState.SILENT, HostState.CORDONED):
            continue  # already lost, or given up by an earlier incident
        if given_up.is_given_up(job, generation, host, PREEMPTION_NOTICE):
            continue
        round_.open_incident(
            job=job.spec.job,
            host_id=host.host_id,
            cause=PREEMPTION_NOTICE,
            message=explained(f"{host.host_id} will be taken away", host.reason),
            generation=generation.generation,
            failed_step=common(),
            observed_at=round_.noticed.get(host.host_id, round_.now),
        )


def _find_drains(round_: Round, job: JobView, generation: GenerationView) -> None:
    known = {i.host_id for i in round_.open_incidents(job.spec.job) if i.cause in DEPARTURES}
    common = functools.cache(lambda: newest_common_step(generation))  # once for all hosts
    for part in generation.hosts:
        host = round_.hosts.get(part.host_id)
        if host is None or host.drain is None or not host.is_drained or host.host_id in known:
            continue
        if host.state is HostState.SILENT:
            continue  # already lost
        why = f" ({host.drain.reason})" if host.drain.reason else ""
        round_.open_incident(
            job=job.spec.job,
            host_id=host.host_id,
            cause=DRAIN_REQUESTED,
            message=f"An operator drains {host.host_id}{why}.",
            generation=generation.generation,
            failed_step=common(),
            observed_at=host.drain.requested_at,
        )


def _lacks_a_host_since(round_: Round, job: JobView, generation: GenerationView) -> float:
    """When it showed that a generation cannot start, as one of its hosts is gone; 0.0: it can. Its start would stop the
    strays first, but a host that only these keep busy may be the one that it waits for."""
    failure, hosts = pending_failure(round_, job), [round_.hosts.get(part.host_id) for part in generation.hosts]
    is_short = any(host is None or round_.is_silent(host.host_id) or host.is_broken for host in hosts)
    return failure.since if failure is not None and is_short else 0.0


def _find_stale_workers(round_: Round, job: JobView, generation: GenerationView) -> None:
    name, has_ended = job.spec.job, job.state.ended
    since = job.ended_at if has_ended else generation.started_at or _lacks_a_host_since(round_, job, generation)
    if since == 0.0 or any(round_.open_actions(name)):
        return
    present = set() if has_ended else {part.host_id for part in generation.hosts}
    known = {i.host_id for i in round_.open_incidents(name) if i.cause == SUPERSEDED_WORKERS}
    for host in round_.hosts.values():
        if name not in host.stale_jobs or host.host_id in present or host.host_id in known:
            continue
        if host.state in (HostState.SILENT, HostState.CORDONED):
            continue
        if given_up.is_given_up(job, generation, host, SUPERSEDED_WORKERS):
            continue
        if host.known_at <= since + (_ENDED_AFTER_S if has_ended else _STALE_AFTER_S):
            continue  # that report may be older than the stop
        stale = host.stale_jobs[name]
        why = f"which has {job.state.value}" if has_ended else f"superseded by {generation.generation}"
        round_.open_incident(
            job=name,
            host_id=host.host_id,
            cause=SUPERSEDED_WORKERS,
            message=f"{host.host_id} still runs workers of generation {stale} of job {name}, {why}.",
            generation=stale,
            observed_at=round_.now,
        )
