"""Carries out each kind of decision in a fixed order of phases, with a command per host in each. Pure.

`advance` looks at an action and its hosts' answers so far, and returns the next move. Any number of actuators may call
it at any time: the move depends on nothing else, and a command's name follows from its place. So a move that is made
twice is the same move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec

from flyball.contracts.cluster import IN_MEMORY_ALONE
from flyball.contracts.decisions import (
    ActionState,
    CommandBody,
    DecisionKind,
    GenerationPlan,
    SaveEmergency,
    StartWorkers,
    UpdateState,
    WarmUp,
)
from flyball.contracts.reports.grant_seals import GrantSeal
from services.actuator.ports import ActionProgress, CommandDraft, OutboxCommand, PlaybookStep
from services.actuator.rules import host_checks, step_names
from services.actuator.rules.command_bodies import (
    FREEING,
    end_body,
    flush_body,
    in_memory_alone,
    list_body,
    outcome,
    release_body,
    save_body,
    save_failure,
    stacks_body,
    stop_body,
    stopped,
)
from services.actuator.rules.host_parts import host_parts
from services.actuator.rules.moves import drafts, end, failure_message, move, names, nobody_listed, number
from services.actuator.rules.restoring import await_engines, nobody_knows_the_job, placement_of
from services.rules.grant_seals import whole_digest
from services.rules.incident_states import ACTION, ActionEvent

STOP, START, SAVE, FLUSH, RELEASE, END, STACKS = "stop", "start", "save", "flush", "release", "end", "stacks"
LIST = "list"  # the copies of a job that no stopped host knows; between a stop and a start

PHASES: Mapping[DecisionKind, tuple[str, ...]] = {
    DecisionKind.START_JOB: (START,),
    DecisionKind.RESTART_IN_PLACE: (STOP, START),
    DecisionKind.MIGRATE_TO_SPARE: (STOP, START),
    DecisionKind.SHRINK: (STOP, START),
    DecisionKind.GROW: (STOP, START),
    DecisionKind.TAKE_STACKS: (STACKS,),
    DecisionKind.CHECK_HOSTS: (STOP, host_checks.CHECK),
    DecisionKind.EMERGENCY_CHECKPOINT: (SAVE, FLUSH),
    DecisionKind.RESUME: (RELEASE,),
    DecisionKind.CORDON: (STOP,),
    DecisionKind.FAIL_JOB: (STOP, END),
    DecisionKind.STOP_JOB: (SAVE, STOP, END),
    DecisionKind.COMPLETE_JOB: (STOP, END),
}
# A job ends even if one of its hosts does not answer: the others are cleaned up all the same. And what is known of some
# ranks may be enough.
_BEST_EFFORT = FREEING | {DecisionKind.TAKE_STACKS, DecisionKind.CHECK_HOSTS}
# A failed start may have begun: only a new generation may try again. A refused command changed nothing.
_ATTEMPTS = {STOP: 3, LIST: 1, START: 1, SAVE: 1, FLUSH: 1, RELEASE: 3, END: 3, STACKS: 1}
_REFUSALS = 3


class _Answers(msgspec.Struct):
    """The answers of a phase so far."""

    done: list[str] = []
    waiting: list[OutboxCommand] = []
    unanswered: list[str] = []  # past their deadline
    failed: list[OutboxCommand] = []
    again: list[str] = []
    late: list[OutboxCommand] = []  # the rank was past the step of an emergency save


def advance(progress: ActionProgress, now: float) -> PlaybookStep:
    """The next move. An empty one (same phase and state, no commands) means: wait until `wake_at`."""
    if progress.state.ended:
        return PlaybookStep(progress.phase, progress.state, attempt=progress.attempt)
    if progress.plan.kind not in PHASES:
        return end(progress, ActionEvent.FAILED, f"There is no playbook for {progress.plan.kind.value}.")
    if not progress.phase:
        return _enter(progress, _phases(progress)[0], now)
    if progress.phase == host_checks.CHECK and progress.plan.check is not None:
        return host_checks.advance(progress, progress.plan.check, now)
    answers = _answers(progress, now)
    return (
        _at_deadline(progress, answers, now)
        or _asked_again(progress, answers, now)
        or _given_up(progress, answers, now)
        or _waiting(progress, answers, now)
        or _phase_done(progress, answers, now)
    )


def may_start(progress: ActionProgress) -> bool:
    """Whether the next move may start a generation, so that the addresses of engines and the copies are needed."""
    if progress.plan.next is None or progress.phase not in ("", STOP, LIST):
        return False
    asked = _asked(progress, STOP)
    return progress.phase != STOP or all(
        asked[host] and asked[host][-1].state is UpdateState.SUCCEEDED for host in progress.plan.stop_hosts
    )


def _at_deadline(progress: ActionProgress, answers: _Answers, now: float) -> PlaybookStep | None:
    """End the action at its deadline, unless all work was done before it, even if no actuator was there to see that."""
    is_last = not _following(progress)
    if now < progress.deadline_at or (is_last and len(answers.done) == len(_targets(progress))):
        return None
    if progress.phase in (FLUSH, STACKS):
        return _phase_done(progress, answers, now)
    return end(progress, ActionEvent.DEADLINE_PASSED, _overdue_message(progress, answers))


def _asked_again(progress: ActionProgress, answers: _Answers, now: float) -> PlaybookStep | None:
    if answers.late:
        return _rename(progress, answers, now)
    if not answers.again:
        return None
    sent = _sent(progress, progress.phase)  # a repeated start must name the same placement, whatever is known by now
    again = drafts(progress, progress.phase, [(host, sent[host][-1].command.body) for host in answers.again], now)
    message = f"asking {names(answers.again)} again"
    return move(progress, progress.phase, progress.state, tuple(again), message=message, now=now)


def _given_up(progress: ActionProgress, answers: _Answers, now: float) -> PlaybookStep | None:
    if progress.plan.kind in _BEST_EFFORT or progress.phase in (FLUSH, LIST):
        return None
    if progress.phase == SAVE and (answers.failed or answers.unanswered):
        return _enter(progress, FLUSH, now)
    if answers.failed:
        return end(progress, ActionEvent.FAILED, failure_message(progress.phase, answers.failed))
    if answers.unanswered:
        return end(progress, ActionEvent.DEADLINE_PASSED, _overdue_message(progress, answers))
    return None


def _waiting(progress: ActionProgress, answers: _Answers, now: float) -> PlaybookStep | None:
    """Wait for answers. Once every host has acknowledged its command, the action is acknowledged."""
    if not answers.waiting:
        return None
    soonest = min(_due(progress, record) for record in answers.waiting)
    wake_at = max(now, min(soonest, progress.deadline_at))
    state = progress.state
    if state is ActionState.DISPATCHED and all(record.update is not None for record in answers.waiting):
        state = ACTION.advance(state, ActionEvent.ANSWERED)
    return PlaybookStep(progress.phase, state, attempt=progress.attempt, wake_at=wake_at)


def _phase_done(progress: ActionProgress, answers: _Answers, now: float) -> PlaybookStep:
    following = _following(progress)
    if following:
        return _enter(progress, following, now)
    if progress.plan.kind is DecisionKind.EMERGENCY_CHECKPOINT:
        event = ActionEvent.FAILED if save_failure(progress) else ActionEvent.COMPLETED
        return end(progress, event, outcome(progress))
    missing = answers.unanswered + [record.command.host_id for record in answers.failed]
    if missing and progress.phase != STACKS:
        return end(progress, ActionEvent.FAILED, f"{names(missing)} could not be cleaned up; the others are.")
    return end(progress, ActionEvent.COMPLETED, f"{names(answers.done)} done")


def _phases(progress: ActionProgress) -> tuple[str, ...]:
    """The phases of this action. A job that succeeded is only cleaned up, unless the user asked for slow tiers.
    Without slow tiers, a saved step needs no flush. A job is stopped without a save, unless the plan names a step. One
    that goes on after its end is stopped first, since the answers list its copies."""
    phases = PHASES[progress.plan.kind]
    checkpoint = progress.plan.spec.checkpoint
    if progress.plan.kind is DecisionKind.START_JOB:
        return (STOP, START) if progress.plan.stop_hosts else phases
    if progress.plan.kind is DecisionKind.STOP_JOB:
        return phases if progress.plan.emergency_step >= 0 else (STOP, END)
    if progress.plan.kind is DecisionKind.COMPLETE_JOB and (checkpoint.disk_is_default or not checkpoint.is_durable):
        return (END,)
    if checkpoint.is_durable:
        return phases
    if progress.plan.kind is DecisionKind.EMERGENCY_CHECKPOINT and progress.phase != FLUSH:
        return (SAVE,)
    return phases


def _following(progress: ActionProgress) -> str:
    """The phase after the current one; '' after the last."""
    phases = (LIST, START) if progress.phase == LIST else _phases(progress)
    return (*phases, "")[phases.index(progress.phase) + 1]


def _enter(progress: ActionProgress, phase: str, now: float) -> PlaybookStep:
    if phase == START:
        return _start(progress, now)
    plan = progress.plan
    if plan.check is not None and (phase == host_checks.CHECK or not plan.check.stops):
        return host_checks.begin(progress, plan.check, now)
    bodies: Mapping[str, tuple[Callable[[], CommandBody], str]] = {
        STOP: (lambda: stop_body(plan), f"stopping generation {plan.generation}"),
        SAVE: (lambda: save_body(progress, plan.emergency_step, now), f"saving step {plan.emergency_step}"),
        FLUSH: (lambda: flush_body(progress, now), "flushing the newest recovery point"),
        RELEASE: (lambda: release_body(progress, now), f"releasing generation {plan.generation}"),
        END: (lambda: end_body(progress), f"ending job {plan.job}"),
        STACKS: (lambda: stacks_body(plan), f"taking the stacks of generation {plan.generation}"),
    }
    make, doing = bodies[phase]
    asking = drafts(progress, phase, [(host, make()) for host in plan.stop_hosts], now)
    asking += _warm_ups(progress, now)
    if not asking:  # all its hosts are lost: nobody to wait for
        phases = (*_phases(progress), "")
        following = phases[phases.index(phase) + 1]
        if following and plan.kind is not DecisionKind.EMERGENCY_CHECKPOINT:
            return _enter(progress, following, now)
        return end(progress, ActionEvent.COMPLETED, "none of its hosts can be reached")
    message = f"{doing} on {names(plan.stop_hosts)}"
    if phase == FLUSH and (failure := save_failure(progress)):
        message = f"{failure}: {message}"
    step = move(progress, phase, _begun(progress), tuple(asking), message=message, now=now)
    is_done = plan.kind is DecisionKind.COMPLETE_JOB and phase == END and STOP in _phases(progress)
    if is_done and (why := in_memory_alone(progress)):
        step = msgspec.structs.replace(step, job_message=f"Its ranks are done, and {IN_MEMORY_ALONE}: {why}.")
    return step


def _begun(progress: ActionProgress) -> ActionState:
    return ACTION.advance(progress.state, ActionEvent.BEGAN) if not progress.phase else progress.state


def _start(progress: ActionProgress, now: float) -> PlaybookStep:
    """Choose the restore step from the copies of the stopped hosts, and start the new generation on its hosts."""
    plan = progress.plan
    following = plan.next
    if following is None:
        return end(progress, ActionEvent.FAILED, "The decision grants no generation to start.")
    results = stopped(progress.commands)
    placement = placement_of(progress, following, results)
    found = placement.restore.step if placement.restore else -1
    if (waiting := await_engines(progress, following, results, found, now)) is not None:
        return waiting
    if found < following.known_step and (again := _ask_for_copies(progress, following.known_step, now)) is not None:
        return again
    if progress.phase != LIST and nobody_knows_the_job(progress, following, results):
        return _list_copies(progress, following, now)
    if why := _why_not(progress, following, found):
        return end(progress, ActionEvent.FAILED, why)
    seal = GrantSeal(whole=whole_digest(placement))  # whoever issues the commands completes it
    bodies = [(host_id, StartWorkers(plan.spec, part, seal)) for host_id, part in host_parts(placement).items()]
    asking = drafts(progress, START, bodies, now) + _warm_ups(progress, now)
    source = f"from step {placement.restore.step}" if placement.restore else "from scratch"
    hosts = names(host.host_id for host in placement.hosts)
    message = f"starting generation {following.generation} {source} on {hosts}"
    step = move(progress, START, _begun(progress), tuple(asking), message=message, now=now)
    return msgspec.structs.replace(step, placement=placement, restore=placement.restore)


def _why_not(progress: ActionProgress, following: GenerationPlan, found: int) -> str:
    """Why not to start from step `found`, the newest that there is (-1: from scratch); '' if nothing is against it."""
    plan = progress.plan
    if found < following.known_step:
        instead = "" if found >= 0 else f" Job {plan.job} does not start from scratch instead: --fresh would."
        return f"Step {following.known_step} was complete, but no host lists it any more.{instead}"
    listings = [records[-1] for records in _sent(progress, LIST).values()]
    if found < 0 and listings and not any(record.state is UpdateState.SUCCEEDED for record in listings):
        return nobody_listed(listings, plan.job)
    if found < 0 and plan.spec.never_from_scratch and plan.history is not None and plan.history.lineage:
        return "No host has a copy of any step, and --never-from-scratch forbids starting over."
    return ""


def _list_copies(progress: ActionProgress, following: GenerationPlan, now: float) -> PlaybookStep:
    """Ask the hosts of the new generation what is in the store and on their disks. Whoever cannot say is passed over:
    then what the database knows counts. If it knows nothing, and nobody can say, nothing is started."""
    hosts = [host.host_id for host in following.hosts]
    body = list_body(progress.plan, following)
    asking = drafts(progress, LIST, [(host, body) for host in hosts], now) + _warm_ups(progress, now)
    message = f"no stopped host knows the job: {names(hosts)} list its copies"
    return move(progress, LIST, _begun(progress), tuple(asking), message=message, now=now)


def _ask_for_copies(progress: ActionProgress, known_step: int, now: float) -> PlaybookStep | None:
    """Ask the stopped hosts for their copies again, a few times. Step `known_step` was reported complete, but is not in
    the answers: an engine was away, or lists less. To restore an older step would lose progress."""
    hosts = progress.plan.stop_hosts
    asked = _asked(progress, STOP)
    tries = max((len(asked[host]) for host in hosts), default=_ATTEMPTS[STOP])
    if tries >= _ATTEMPTS[STOP] or progress.phase == LIST:
        return None
    again = drafts(progress, STOP, [(host, stop_body(progress.plan)) for host in hosts], now)
    message = f"step {known_step} is not in the inventories: asking {names(hosts)} again"
    return move(progress, STOP, progress.state, tuple(again), message=message, now=now)


def _rename(progress: ActionProgress, answers: _Answers, now: float) -> PlaybookStep:
    """Name a later step for all ranks: some had passed this one before it was armed everywhere. While there is time."""
    named, step = max(step_names.named_steps(progress.commands)), step_names.next_name(progress)
    if progress.attempt >= step_names.MAX_NAMES or now >= step_names.last_name_at(progress, now):
        return _enter(progress, STOP if progress.plan.kind is DecisionKind.STOP_JOB else FLUSH, now)
    body = save_body(progress, step, now)
    renamed = tuple(drafts(progress, SAVE, [(host, body) for host in progress.plan.stop_hosts], now))
    message = f"{names(r.command.host_id for r in answers.late)} had passed step {named}: saving step {step} instead"
    moved = move(progress, SAVE, progress.state, renamed, message=message, now=now)
    return msgspec.structs.replace(moved, attempt=progress.attempt + 1)


def _answers(progress: ActionProgress, now: float) -> _Answers:
    answers, asked_of = _Answers(), _asked(progress, progress.phase)
    for host in _targets(progress):
        asked = asked_of[host]  # never empty: a phase begins with its commands
        record = asked[-1]
        failures = sum(1 for r in asked if r.state is UpdateState.FAILED)
        refusals = sum(1 for r in asked if r.state is UpdateState.REFUSED)
        match record.state:
            case UpdateState.SUCCEEDED:
                answers.done.append(host)
            case UpdateState.FAILED if progress.phase == SAVE and record.update and record.update.code == "too_late":
                answers.late.append(record)
            case UpdateState.FAILED:
                if failures < _ATTEMPTS[progress.phase]:
                    answers.again.append(host)
                else:
                    answers.failed.append(record)
            case UpdateState.REFUSED:
                if refusals < _REFUSALS:
                    answers.again.append(host)
                else:
                    answers.failed.append(record)
            case _ if now >= _due(progress, record):
                answers.unanswered.append(host)
            case _:
                answers.waiting.append(record)
    return answers


def _due(progress: ActionProgress, record: OutboxCommand) -> float:
    """When to give up a host that has not answered. In an emergency, exactly at its deadline: the rest of the time is
    for the flush."""
    if progress.phase in (SAVE, STACKS):
        return record.created_at + record.command.deadline_s
    return progress.answer_due(record)


def _targets(progress: ActionProgress) -> tuple[str, ...]:
    if progress.phase in (LIST, START) and progress.plan.next is not None:
        return tuple(host.host_id for host in progress.plan.next.hosts)
    return progress.plan.stop_hosts


def _asked(progress: ActionProgress, phase: str) -> dict[str, list[OutboxCommand]]:
    """host -> its commands of a phase, oldest first; for an emergency save only those of the latest step."""
    asked = _sent(progress, phase)
    if phase == SAVE:
        for host, records in asked.items():
            newest = max((b.step for r in records if isinstance(b := r.command.body, SaveEmergency)), default=-1)
            asked[host] = [r for r in records if isinstance(b := r.command.body, SaveEmergency) and b.step == newest]
    return asked


def _sent(progress: ActionProgress, phase: str) -> dict[str, list[OutboxCommand]]:
    """host -> its commands of a phase, oldest first; in one pass, as there may be thousands of hosts."""
    sent: defaultdict[str, list[OutboxCommand]] = defaultdict(list)
    for record in progress.commands:
        if record.phase == phase and not isinstance(record.command.body, WarmUp):
            sent[record.command.host_id].append(record)
    for records in sent.values():
        records.sort(key=lambda record: number(record.command.command_id))
    return sent


def _warm_ups(progress: ActionProgress, now: float) -> list[CommandDraft]:
    """Commands that go out with the first phase, and that nobody waits for."""
    if progress.phase:
        return []
    remaining_s = progress.remaining_s(now)
    return [
        CommandDraft(f"{progress.action_id}.warm.{host}.1", host, WarmUp(progress.plan.spec), remaining_s)
        for host in progress.plan.warm_hosts
    ]


def _overdue_message(progress: ActionProgress, answers: _Answers) -> str:
    silent = answers.unanswered + [record.command.host_id for record in answers.waiting]
    if not silent:
        return f"The deadline of {progress.plan.deadline_s:.0f} s passed in phase {progress.phase}."
    return f"{names(silent)} did not answer in time in phase {progress.phase}."
