"""Rules for a job as a whole, and for workers that it left behind."""

from __future__ import annotations

from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import DecisionKind
from services.controller.round import plans
from services.controller.round.choices import spare_choice
from services.controller.round.diagnosis import crash_after_done, is_done
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import JobView
from services.controller.rules import check_rules
from services.controller.rules.step_ahead import is_stepping, step_ahead
from services.rules.wording import counted, kept, listed

_ASK_AGAIN_S = 1.0
_WELL = (HostState.HEALTHY, HostState.SPARE, HostState.SUSPECT)


def stop_on_request(case: Case) -> Verdict | None:
    """Stop the job on request, before anything else."""
    job = case.job
    if not job.stop_requested:
        return None
    last_step = _last_step(case)
    return Verdict(
        DecisionKind.STOP_JOB,
        f"An operator asked to stop job {job.spec.job}, which had completed "
        + (f"step {job.newest_step}." if job.newest_step >= 0 else "no step.")
        + (f" Every rank saves step {last_step} first." if last_step >= 0 else ""),
        plan=plans.end_plan(case, DecisionKind.STOP_JOB, job.spec.stop_grace_s, last_step=last_step),
        evidence={"newest_step": job.newest_step},
        job_state=JobState.STOPPING,
    )


def end_when_workers_are_gone(round_: Round, job: JobView) -> None:
    """End a job whose end was decided, once the action that carries it out is over, however that went."""
    if not any(round_.open_actions(job.spec.job)):
        round_.change_job(job.spec.job, job.state.outcome, job.message)


def _last_step(case: Case) -> int:
    """The step to save before a job stops; -1 for none. Only if saved steps outlive the job, not all steps are saved
    anyway, and workers get a grace."""
    job, generation = case.job, case.job.generation
    spec = job.spec.checkpoint
    if generation is None or not spec.is_durable or spec.every_steps == 1 or job.spec.stop_grace_s <= 0:
        return -1
    return step_ahead(case, generation) if is_stepping(case, generation) else -1


def complete_when_all_ranks_are_done(case: Case) -> Verdict | None:
    """Complete the job when every worker ended with exit code 0, or crashed after it reported to be done."""
    job, generation = case.job, case.job.generation
    if job.state is not JobState.RUNNING or generation is None or len(generation.ranks) < job.spec.world_size:
        return None
    if not all(is_done(rank) for rank in generation.ranks):
        return None
    crashed = [text for rank in generation.ranks if (text := crash_after_done(rank))]
    evidence: dict[str, str | int] = {"generation": generation.generation, "newest_step": job.newest_step}
    if crashed:
        evidence["crashed_after_done"] = "; ".join(crashed[:16])
    one = job.spec.world_size == 1
    done = "The only rank" if one else f"All {job.spec.world_size} ranks"
    crash = "was done; it crashed" if one else f"were done; {len(crashed)} crashed"
    return Verdict(
        DecisionKind.COMPLETE_JOB,
        f"{done} of generation {generation.generation} "
        + (f"{crash} on the way out." if crashed else "ended with exit code 0."),
        plan=plans.end_plan(case, DecisionKind.COMPLETE_JOB, job.spec.stop_grace_s),
        evidence=evidence,
        job_state=JobState.COMPLETING,
    )


def start_when_hosts_suffice(case: Case) -> Verdict | None:
    """Start a submitted job once enough healthy hosts are free, without those that an earlier job waits for, and
    without spares of running jobs. If the job may run on fewer than it asks for, start it so when no further host came
    for some time."""
    job = case.job
    if job.state is not JobState.SUBMITTED:
        return None
    before = job.before.hosts if job.before else ()
    others = {**case.round.kept_for, **case.round.spare_of}
    free = [host for host in case.free_hosts if host.host_id not in others]
    free = check_rules.fit_hosts(case.round, job, free)
    nnodes = job.spec.nnodes
    if len(free) < nnodes and len(free) >= job.spec.fewest_nnodes:
        due_at = max(job.submitted_at, *(host.since for host in free)) + case.settings.shrink_after_s
        if case.now >= due_at:
            nnodes = len(free)
        else:
            case.round.wake(due_at)
    hosts = spare_choice.place(job.spec.on(nnodes), free, before)
    if hosts is None:
        return None
    again = " It goes on from its newest recovery point." if job.before and job.before.lineage else ""
    names = [part.host_id for part in hosts]
    ranks = sum(len(part.ranks) for part in hosts)
    return Verdict(
        DecisionKind.START_JOB,
        f"Job {job.spec.job} needs {_needed(job.spec)}, and {listed(names)} {'is' if len(hosts) == 1 else 'are'} "
        f"free: {ranks} rank{' starts' if ranks == 1 else 's start'} there.{again}",
        plan=plans.start_plan(case, hosts),
        evidence={"nnodes": len(hosts), "nproc_per_node": job.spec.nproc_per_node, "hosts": kept(names)},
    )


def reserve_spares(round_: Round, job: JobView) -> None:
    """Reserve free hosts as spares of a running job, before jobs that wait. In very large clusters a round does not
    cover all hosts, and none is reserved."""
    if job.state is JobState.RUNNING and job.spec.spares and round_.view.is_whole:
        free = [host.host_id for host in round_.well_hosts(job.spec) if host.host_id not in round_.spare_of]
        round_.spare_of.update(dict.fromkeys(free[-job.spec.spares :], job.spec.job))


def say_what_is_missing(round_: Round, job: JobView, held: Verdict | None = None) -> None:
    """Set the message of a waiting job, and reserve the hosts that are free already: first come, first served. Later
    jobs overtake it if that does not delay it: on hosts that it may not use, or if there are too few for it. `held`:
    what it waits for although there are enough hosts."""
    free = [host.host_id for host in round_.free_hosts(job.spec)]
    kept_for = {host_id: round_.kept_for[host_id] for host_id in free if host_id in round_.kept_for}
    spares = {host_id: round_.spare_of[host_id] for host_id in free if host_id in round_.spare_of}
    taken = round_.claimed_by_others(job.spec.job)
    claimed = [host_id for host_id in free if host_id in taken]
    free = [h for h in free if h not in kept_for and h not in spares and h not in claimed]
    among = f" of {listed(job.spec.hosts)}" if job.spec.hosts else ""
    first = next(iter(kept_for.values()), "")
    earlier = f" (job {first} came first and waits for {listed(list(kept_for))})" if kept_for else ""
    if spares:
        running = listed(sorted(set(spares.values())))
        earlier += f" ({listed(list(spares))}: spare{'' if len(spares) == 1 else 's'} of {running})"
    if claimed:
        earlier += f" ({listed(claimed)}: another job's ranks are about to move there)"
    message = f"waits for hosts: it needs {_needed(job.spec)}{among}, free: {listed(free) or 'none'}{earlier}"
    if held is not None:
        message = f"waits for {held.holding_for}"
        round_.wake(held.hold_until)
    message = check_rules.waits_for_checks(round_, job) or message
    if message != job.message:
        round_.change_job(job.spec.job, job.state, message)
    if _may_start_one_day(round_, job):
        round_.kept_for.update(dict.fromkeys(free[: job.spec.nnodes], job.spec.job))


def _may_start_one_day(round_: Round, job: JobView) -> bool:
    """Whether there are enough hosts, including busy ones: a job that can never start must not hold up all others. In
    very large clusters a round does not cover all hosts, and nothing is reserved."""
    if not round_.view.is_whole:
        return False
    named, fresh_at = frozenset(job.spec.hosts), round_.now - round_.settings.spare_fresh_s
    well = (
        h
        for h in round_.hosts.values()
        if h.state in _WELL and not h.left_at and not h.is_unfit and (h.job or h.last_report_at >= fresh_at)
    )  # a free host that is switched off does not count
    return sum(not named or host.host_id in named for host in well) >= job.spec.fewest_nnodes


def stop_superseded_workers(case: Case) -> Verdict | None:
    """Stop the old workers of a host that came back, before it gets work."""
    incident = case.incident
    if incident is None:
        return None
    busy = next(case.round.open_actions(case.job.spec.job), None)
    if busy is not None:
        return Verdict(
            DecisionKind.HOLD,
            f"{incident.message} They are stopped when {busy.action_id} is over.",
            holding_for=f"{busy.action_id} to be over",
            hold_until=case.now + _ASK_AGAIN_S,
        )
    generation = case.round.hosts[incident.host_id].stale_jobs[incident.job]
    plan = plans.clean_plan(case, incident.host_id, generation)
    return Verdict(
        plan.kind,
        f"{incident.message} They are stopped before {incident.host_id} may take new work.",
        plan=plan,
        evidence={"host": incident.host_id, "generation": generation},
    )


def _needed(spec: JobSpec) -> str:
    """How many hosts the job asks for: "4 hosts (at least 2)"."""
    asked = counted(spec.asked_nnodes, "host")
    return asked if spec.fewest_nnodes == spec.asked_nnodes else f"{asked} (at least {spec.fewest_nnodes})"
