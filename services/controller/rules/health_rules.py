"""Rules for the health of the training itself: its state is wrong though all ranks run, or comes to nothing from a
recovery point.

A harm (`Harm`) marks steps as good, suspect or bad. A restart goes back to the newest recovery point before it. The
reason says what progress this gives up. What comes back after that is no accident, so a person has to look.
"""

from __future__ import annotations

from flyball.contracts.checkpoints import Lineage
from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import DecisionKind, Harm, Incident, IncidentState
from flyball.contracts.error_classes import ErrorClass, error_class_of
from flyball.contracts.reports.signals import ReplicasDiffer, Signal
from flyball.contracts.reports.training_health import LossDiverged, LossRecovered, ReplayDiffers
from services.controller.round import guardrails, pace, plans
from services.controller.round.diagnosis import (
    BESIDE_FAILURES,
    HARMS,
    LOSS_DIVERGED,
    REPLAY_DIFFERS,
    REPLICAS_DIFFER,
    WORKER_EXCEPTION,
    Failure,
    exit_failure,
    newest_common_step,
)
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Evidence, Verdict
from services.controller.round.view import GenerationView, JobView, PastFailure
from services.controller.rules import recovery_rules
from services.rules import recovery_point
from services.rules.incident_states import IncidentEvent
from services.rules.wording import counted, listed, ranks_kept, ranks_of

_LOOK_AGAIN_S = 60.0
_MAX_HARMS = 3  # in as many generations, close together: each got further, but something is wrong
_SOON_STEPS = 10  # a failure within these after a restore may be the restored state's


def take_signal(round_: Round, signal: Signal) -> None:
    """Take in a signal about the health of a training, if it is of the job's newest generation; ignore others."""
    body = signal.body
    if not isinstance(body, LossDiverged | LossRecovered | ReplicasDiffer | ReplayDiffers):
        return
    job = round_.jobs.get(body.job)
    generation = job.generation if job is not None else None
    if generation is None or generation.generation != body.generation:
        return
    if isinstance(body, LossRecovered):
        for incident in round_.open_incidents(body.job):
            if (incident.cause, incident.generation) == (LOSS_DIVERGED, body.generation) and incident.holding_for:
                round_.advance(incident, IncidentEvent.CLEARED, lost_steps=0)
        return
    if isinstance(body, LossDiverged):
        failure: Failure | None = _loss_failure(body, signal.at)
    elif isinstance(body, ReplicasDiffer):
        failure = _replicas_failure(signal, body, generation)
    else:
        failure = _replay_failure(signal, body, generation)
    if failure is not None:
        round_.reported.setdefault(body.job, []).append(failure)


def replaces(failure: Failure, incident: Incident) -> bool:
    """Whether a failure becomes the cause of an undecided incident of its generation: it explains the incident, or ends
    ranks that trained on while a person was to look at a harm."""
    return failure.explains(incident.cause) or (unless_held(incident) is None and failure.cause not in HARMS)


def failure_of(round_: Round, job: str) -> Incident | None:
    """Return the job's open incident about a failed generation; there is at most one."""
    return next((i for i in round_.open_incidents(job) if i.cause not in BESIDE_FAILURES), None)


def is_left_behind(incident: Incident, generation: GenerationView) -> bool:
    """Whether a harm that is held belongs to an earlier generation: ranks have moved since. If the new generation is
    harmed, that is reported anew."""
    return unless_held(incident) is None and incident.generation < generation.generation


def unless_held(failure: Incident | None) -> Incident | None:
    """The failure, unless it is a held harm: ranks train on for as long as a person takes, so nothing waits for it."""
    is_held = failure is not None and failure.cause in HARMS and bool(failure.holding_for)
    return None if is_held else failure


def first_to_handle(round_: Round, job: JobView) -> Incident | None:
    """The open failure for which other incidents wait; None if there is none, or its ranks train again. They may repeat
    steps for days until the failure counts as recovered, and a host can be left meanwhile."""
    failure = unless_held(failure_of(round_, job.spec.job))
    return None if failure is None or _trains_again(failure, job) else failure


def _trains_again(failure: Incident, job: JobView) -> bool:
    generation = job.generation
    return (
        failure.state is IncidentState.VERIFYING
        and generation is not None
        and len(generation.ranks) == job.spec.world_size
        and all(rank.exited is None and rank.step > failure.restored_step for rank in generation.ranks)
    )


def hold_when_a_harm_returns(case: Case) -> Verdict | None:
    """Hold for a person if a harm comes back after a restart from before it, or is the third with little progress in
    between."""
    found = _harm_while_training(case)
    if found is None:
        return None
    incident, harm = found
    times = guardrails.times_harmed(case.job, case.settings)
    if guardrails.returns(harm, incident, case.job):
        why = "It came back after a restart from before it, so another one would meet it again."
    elif times >= _MAX_HARMS:
        why = f"It is the harm number {times} with little progress in between: restarts from before it do not end that."
    else:
        return None
    return _hold(case, incident, harm, why, times)


def hold_without_a_clean_step(case: Case) -> Verdict | None:
    """Hold for a person if no recovery point is older than the harm, since only starting over would undo it."""
    found = _harm_while_training(case)
    if found is None or _clean_point(case, *found) >= 0:
        return None
    why = "No recovery point is older than that: only starting over would undo it."
    return _hold(case, *found, why, guardrails.times_harmed(case.job, case.settings))


def leave_the_host_of_a_bad_device(case: Case) -> Verdict | None:
    """If a rank's replay shows a bad device, move the ranks of its host to a spare, from before the harm, and cordon
    it: in place the device would do it again."""
    found = _harm_while_training(case)
    if found is None or found[0].cause != REPLAY_DIFFERS:
        return None
    incident, harm = found
    verdict = recovery_rules.move(case, (incident.host_id,), avoid=(incident.host_id,))
    if verdict is None:
        return None
    what, step, lost = going_back(case, incident, harm)
    return Verdict(
        verdict.kind,
        f"{verdict.reason} {what} {incident.host_id} gets no work until an operator releases it.",
        plan=verdict.plan,
        evidence={**verdict.evidence, **_marks(harm), "restart_step": step, "steps_given_up": lost},
        cordons=(incident.host_id,),
    )


def restart_before_the_harm(case: Case) -> Verdict | None:
    """Restart from the newest recovery point before the harm, since newer ones would bring it back."""
    found = _harm_while_training(case)
    if found is None:
        return None
    incident, harm = found
    what, step, lost = going_back(case, incident, harm)
    verdict = recovery_rules.restart(case, what, lineage=plans.clean_history(case, case.this_generation, incident))
    evidence = {**verdict.evidence, **_marks(harm), "restart_step": step, "steps_given_up": lost}
    return Verdict(verdict.kind, verdict.reason, plan=verdict.plan, evidence=evidence)


def leave_a_recovery_point_that_fails(case: Case) -> Verdict | None:
    """Restart from an older recovery point if workers threw exceptions soon after two restores of the same one."""
    incident, generation = case.this_incident, case.this_generation
    step = generation.restore_step
    if incident.cause != WORKER_EXCEPTION or step is None or incident.generation != generation.generation:
        return None
    if not _threw_after_attaching(generation):
        return None
    before = generation.generation - 1
    both = (before, generation.generation)
    threw = (f for f in case.job.failures if f.generation in both and f.cause == WORKER_EXCEPTION)
    failed = {f.generation: f.step for f in threw if not _is_hardware(f)}
    is_known = all(step <= failed.get(number, -1) <= step + _SOON_STEPS for number in both)
    # A generation that is not part of the history left no recovery point of its own.
    if not is_known or any(entry.generation == before for entry in generation.lineage):
        return None
    if _newest_point(case, generation.lineage) > step:
        return None
    older = recovery_point.before(generation.lineage, step)
    goal = _newest_point(case, older)
    if goal < 0:
        return None
    return recovery_rules.restart(
        case,
        f"Generations {before} and {generation.generation} both failed soon after restoring step {step}, so it is "
        f"suspect: generation {generation.generation + 1} goes back to step {goal}.",
        lineage=older,
    )


# --- parts of the rules ----------------------------------------------------------------------------------------------


def _threw_after_attaching(generation: GenerationView) -> bool:
    """Whether a worker that threw an exception had attached before, so that it may have loaded the recovery point. An
    unknown phase counts."""
    for rank in generation.ranks:
        failure = exit_failure(rank, generation)
        if failure is None or rank.exited is None or failure.cause != WORKER_EXCEPTION:
            continue
        if rank.exited.last_phase is not Phase.STARTING:
            return True
    return False


def _is_hardware(failure: PastFailure) -> bool:
    """Whether the driver blamed the GPU: then no recovery point is to blame."""
    return error_class_of(failure.error_message) is ErrorClass.GPU_HARDWARE


def _harm_while_training(case: Case) -> tuple[Incident, Harm] | None:
    """The incident and its harm, if that is what the incident is about: the ranks train on."""
    incident = case.this_incident
    return (incident, incident.harm) if incident.cause in HARMS and incident.harm is not None else None


def _hold(case: Case, incident: Incident, harm: Harm, why: str, times: int) -> Verdict:
    job = case.job.spec.job
    bad = f"the steps after {harm.clean_step}" if harm.clean_step >= 0 else "all its steps"
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} {why} Training goes on, and a person has to decide: let it train, or fix the cause, then "
        f"flyball stop {job}, flyball ckpt rm for {bad}, and the same command again.",
        evidence={**_marks(harm), "times": times},
        holding_for="a person",
        hold_until=case.now + _LOOK_AGAIN_S,
    )


def going_back(case: Case, incident: Incident, harm: Harm) -> tuple[str, int, int]:
    """In words how far a restart from before the harm goes back; that step, and how many steps it gives up."""
    step, generation = _clean_point(case, incident, harm), case.this_generation
    newest = newest_common_step(generation)
    lost, redo_s = max(0, newest - step), max(0, newest - step) * pace.step_duration_s(case, newest)
    ranks = counted(case.job.spec.world_size, "rank")
    words = (
        f"Step {step} is the newest recovery point before the harm: generation {generation.generation + 1} starts from "
        f"it. This gives up {counted(lost, 'step')} ({redo_s:.0f} s of training on {ranks}), which are bad or "
        f"suspect."
    )
    return words, step, lost


def _marks(harm: Harm) -> Evidence:
    return {"clean_step": harm.clean_step, "first_bad_step": harm.first_step}


def _clean_point(case: Case, incident: Incident, harm: Harm) -> int:
    """The newest recovery point before the harm by the reported copies, -1 if there is none."""
    generation = case.this_generation
    point = _newest_point(case, plans.clean_history(case, generation, incident))
    return point if point <= harm.clean_step else -1


def _newest_point(case: Case, lineage: Lineage) -> int:
    copies = [copy for copy in case.round.view.copies if copy.job == case.job.spec.job]
    step = recovery_point.newest_step(copies, lineage, case.job.spec.world_size)
    return -1 if step is None else step


def _loss_failure(body: LossDiverged, at: float) -> Failure:
    usual = f"it was {_shown(body.usual)} (median; MAD {_shown(body.spread)}) before"
    if isinstance(body.usual, str):
        usual = "too few were seen before to say what is usual"
    before = f"Up to step {body.clean_step} it was good, and {usual}." if body.clean_step >= 0 else "It never was good."
    what = (
        f"is {_shown(body.value)}"
        if isinstance(body.value, str)
        else f"is {_shown(body.value)}, a spike that does not heal"
    )
    limit = f", and at most {_shown(body.limit)} is usual" if not isinstance(body.limit, str) else ""
    return Failure(
        cause=LOSS_DIVERGED,
        message=(
            f"The loss diverged: rank {body.rank} reports bad values from step {body.first_step} on "
            f"({body.samples} seen); at step {body.step} it {what}{limit}. {before}"
        ),
        generation=body.generation,
        at=at,
        rank=body.rank,
        step=body.first_step,
        is_step_known=True,
        evidence={
            "rank": body.rank,
            "step": body.step,
            "loss": body.value,
            "usual": body.usual,
            "spread": body.spread,
            "limit": body.limit,
            "samples": body.samples,
        },
        harm=Harm(body.clean_step, body.first_step),
    )


def _replicas_failure(signal: Signal, body: ReplicasDiffer, generation: GenerationView) -> Failure | None:
    """None if nobody ever saw these replicas equal: then the script may mean them to differ."""
    if not any(part.host_id == signal.source for part in generation.hosts):
        return None
    if body.equal_step < 0:
        return None
    tensors = f"{listed(body.tensors)}{f' ({body.count} in all)' if body.count > len(body.tensors) else ''}"
    named = f"{ranks_of(body.differ).capitalize()} on {signal.source} differ{'s' if len(body.differ) == 1 else ''}"
    most = f" from {ranks_of(body.agree)}, the majority" if body.agree else ", and no majority shows which is right"
    return Failure(
        cause=REPLICAS_DIFFER,
        message=f"Silent corruption, or a bug: at step {body.step} replicas of {tensors} differ, which were equal at "
        f"step {body.equal_step}. {named}{most}.",
        generation=body.generation,
        at=signal.at,
        rank=body.differ[0] if body.agree and body.differ else -1,
        host_id=signal.source,
        step=body.step,
        is_step_known=True,
        evidence={
            "differ": ranks_kept(body.differ),
            "agree": ranks_kept(body.agree),
            "tensors": listed(body.tensors),
            "count": body.count,
            "step": body.step,
            "equal_step": body.equal_step,
        },
        harm=Harm(body.equal_step, body.step),
    )


def _replay_failure(signal: Signal, body: ReplayDiffers, generation: GenerationView) -> Failure | None:
    """None unless it proves a bad device (see `ReplayDiffers.is_bad_device`): a host is cordoned for it."""
    host_id = signal.source
    is_placed = any(part.host_id == host_id and body.rank in part.ranks for part in generation.hosts)
    if not is_placed or not body.is_bad_device:
        return None
    peer_host = next((part.host_id for part in generation.hosts if body.peer in part.ranks), "another host")
    tensors = f"{listed(body.tensors)}{f' ({body.count} in all)' if body.count > len(body.tensors) else ''}"
    same = f" (that of its run {body.as_peer})" if body.as_peer else ""
    if body.deterministic:
        proof = "torch.use_deterministic_algorithms was on"
    else:
        proof = f"{body.own_odd} of {body.own_runs} more runs of rank {body.rank} were odd ones"
    restored = -1 if generation.restore_step is None else generation.restore_step
    clean_step = body.equal_step if body.equal_step >= 0 else restored
    if body.equal_step >= 0:
        before = f"At step {clean_step} no rank's replay differed."
    else:
        before = "No earlier replay of this generation shows up to which step its device was good, so " + (
            f"the restored step {restored} counts." if restored >= 0 else "no step counts."
        )
    return Failure(
        cause=REPLAY_DIFFERS,
        message=f"Silent corruption: at step {body.step} rank {body.rank} on {host_id} computed the same twice, and "
        f"{tensors} differed, while rank {body.peer} on {peer_host} computed it {body.peer_runs} times with one "
        f"result{same}, and {proof}. So the device is bad, not the computation. {before}",
        generation=body.generation,
        at=signal.at,
        rank=body.rank,
        host_id=host_id,
        step=body.step,
        is_step_known=True,
        evidence={
            "rank": body.rank,
            "step": body.step,
            "equal_step": body.equal_step,
            "tensors": listed(body.tensors),
            "count": body.count,
            "peer": body.peer,
            "peer_host": peer_host,
            "peer_runs": body.peer_runs,
            "as_peer": body.as_peer,
            "own_runs": body.own_runs,
            "own_odd": body.own_odd,
            "deterministic": body.deterministic,
            "differing": body.differing,
            "ranks": body.ranks,
        },
        harm=Harm(clean_step, body.step),
    )


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
