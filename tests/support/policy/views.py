"""A small cluster as the policy sees it: one job with two ranks on hosts a and b, and the spare c."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase, WorkerError
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Decision,
    DecisionKind,
    GenerationPlan,
    Incident,
    IncidentState,
)
from flyball.contracts.reports.signals import Signal, SignalBody, WorkerExited
from services.controller.round.view import (
    ActionView,
    GenerationView,
    HostView,
    JobView,
    Outcome,
    PastFailure,
    PolicySettings,
    RankView,
    View,
)

NOW = 10_000.0
SETTINGS = PolicySettings()
SPEC = JobSpec(
    job="job", argv=("t.py",), workdir="/", nnodes=2, nproc_per_node=1, checkpoint=CheckpointSpec(every_steps=1)
)


def host(name: str, *, state: HostState = HostState.HEALTHY, job: str = "", **more: object) -> HostView:
    facts = {"since": NOW - 500, "last_report_at": NOW - 0.1, "failure_domain": f"rack-{name}", "free_port": 29_500}
    return HostView(
        host_id=name,
        state=state,
        address="10.0.0.1",
        engine_address=f"{name}:7",
        job=job,
        **{**facts, **more},  # type: ignore[arg-type]  # a builder
    )


def rank(number: int, on: str, *, step: int = 50, phase: Phase = Phase.STEP, at: float = NOW - 0.1) -> RankView:
    return RankView(number, on, step, phase, at)


GENERATION = GenerationView(
    generation=2,
    parent=1,
    lineage=(LineageEntry(1, 40), LineageEntry(2)),
    hosts=(HostRanks("a", "10.0.0.1", "a:7", (0,)), HostRanks("b", "10.0.0.1", "b:7", (1,))),
    peers={"a": ("b",), "b": ("a",)},
    started_at=NOW - 100,
    restore_step=40,
    restart_count=1,
    ranks=(rank(0, "a"), rank(1, "b")),
    furthest_step=50,  # it made no progress yet
)
JOB = JobView(SPEC, JobState.RUNNING, NOW - 1000, False, GENERATION, newest_step=50, message="running on a, b")
HOSTS = (host("a", job="job"), host("b", job="job"), host("c"))
SAVED = tuple(ShardCopy("job", 2, 50, number, Tier.MEMORY, "a", 1, "d") for number in (0, 1))


def view(
    *,
    job: JobView = JOB,
    hosts: Sequence[HostView] = HOSTS,
    incidents: Sequence[Incident] = (),
    actions: Sequence[ActionView] = (),
    copies: Sequence[ShardCopy] = (),
) -> View:
    return View((job,), tuple(hosts), tuple(incidents), tuple(actions), tuple(copies), 7, 70)


def say(body: SignalBody, *, source: str = "", at: float = NOW, seq: int = 1) -> Signal:
    """Said by the host that has the rank, unless another is named."""
    return Signal(source or ("b" if getattr(body, "rank", 0) == 1 else "a"), "i1", seq, at, body)


def exited(
    number: int = 1, *, generation: int = 2, exit_code: int | None = 1, signal: int | None = None, error: str = "boom"
) -> WorkerExited:
    problem = WorkerError("ValueError", error) if error else None
    return WorkerExited("job", generation, number, 4242, exit_code, signal, 50, problem)


KILLED = exited(exit_code=None, signal=9, error="")
LOST = exited(error="Connection reset by peer")


def incident(**more: object) -> Incident:
    facts: dict[str, object] = {
        "incident_id": "inc-1",
        "job": "job",
        "host_id": "b",
        "cause": "worker_killed",
        "state": IncidentState.ACTING,
        "opened_at": NOW - 10,
        "since": NOW - 10,
        "message": "Rank 1 was killed.",
        "generation": 1,
        "failed_step": 50,
        "action_id": "act-1",
        "decisions_made": 1,
    }
    return Incident(**{**facts, **more})  # type: ignore[arg-type]  # a builder


def action(**more: object) -> ActionView:
    plan = ActionPlan(
        DecisionKind.RESTART_IN_PLACE,
        "job",
        SPEC,
        generation=1,
        stop_hosts=("a", "b"),
        next=GenerationPlan("job", 2, 1, (), {}, (), restart_count=1),
    )
    facts: dict[str, object] = {
        "action_id": "act-1",
        "decision_id": "dec-1",
        "incident_id": "inc-1",
        "plan": plan,
        "state": ActionState.SUCCEEDED,
        "phase": "start",
        "started_at": NOW - 10,
        "positions": {"0": 50, "1": 51},
        "restore_step": 49,
        "restore_fixed": True,
    }
    return ActionView(**{**facts, **more})  # type: ignore[arg-type]  # a builder


def decided(outcome: Outcome) -> Decision:
    (decision,) = outcome.decisions
    return decision


def submitted(**more: object) -> JobView:
    return JobView(SPEC, JobState.SUBMITTED, NOW, False, None, **more)  # type: ignore[arg-type]  # a builder


def with_exit(body: WorkerExited, at: float = NOW) -> JobView:
    ranks = tuple(
        msgspec.structs.replace(r, exited=body, exited_at=at) if r.rank == body.rank else r for r in GENERATION.ranks
    )
    return msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))


def preempted() -> tuple[HostView, ...]:
    return (HOSTS[0], host("b", job="job", preempt_deadline_at=NOW + 20), HOSTS[2])


BUDGET = {"generation": 2, "restarts": 1, "restarts_used": 1, "max_restarts": 3}
STOPPED = msgspec.structs.replace(JOB, stop_requested=True)
UNSTARTED = msgspec.structs.replace(
    JOB, generation=msgspec.structs.replace(GENERATION, started_at=0.0, ranks=(), restore_step=None)
)
SEEN_BEFORE = msgspec.structs.replace(JOB, failures=(PastFailure(1, "worker_exception", "ValueError", "boom", 50),))
NOTICED = incident(
    cause="preemption_notice", generation=2, state=IncidentState.DECIDING, action_id="", decisions_made=0
)
