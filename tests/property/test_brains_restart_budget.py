"""Any history of failures: without progress it ends after --max-restarts, with progress in between it never does."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from support.policy.checked import decide

from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import DecisionKind, GenerationPlan
from flyball.contracts.reports.signals import Signal, WorkerExited
from services.controller.round.view import GenerationView, HostView, JobView, PolicySettings, RankView, View

NOW = 100_000.0
SETTINGS = PolicySettings()
HOSTS = tuple(
    HostView(name, HostState.HEALTHY, 0.0, "ip", name, f"{name}:7", 1, NOW - 0.1, job="job") for name in ("a", "b")
)
PARTS = (HostRanks("a", "ip", "a:7", (0,)), HostRanks("b", "ip", "b:7", (1,)))


class Life(msgspec.Struct, frozen=True):
    """How a generation went: from where it was restored (back from the furthest step), and to where."""

    back: int
    steps: int
    ran_s: float


def end_of(plan: GenerationPlan | None, life: Life, furthest: int, spec: JobSpec) -> tuple[GenerationPlan | None, int]:
    """Run the generation that was granted, kill a rank of it, and return what was granted then."""
    restored = None if furthest < life.back else furthest - life.back
    reached = (-1 if restored is None else restored) + life.steps
    number = 1 if plan is None else plan.generation
    generation = GenerationView(
        generation=number,
        parent=None,
        lineage=(),
        hosts=PARTS,
        peers={},
        started_at=NOW - life.ran_s,
        restore_step=restored,
        restart_count=0 if plan is None else plan.restart_count,
        ranks=tuple(RankView(rank, host, reached, Phase.STEP, NOW) for rank, host in enumerate("ab")),
        restarts_used=0 if plan is None else plan.restarts_used,
        furthest_step=-1 if plan is None else plan.furthest_step,
    )
    job = JobView(spec, JobState.RUNNING, 0.0, False, generation, newest_step=max(furthest, reached))
    killed = Signal("b", "i", number, NOW, WorkerExited("job", number, 1, 7, None, 9, reached, None))
    (decision,) = decide(View((job,), HOSTS, (), (), (), 1, 1), [killed], SETTINGS, NOW).decisions
    if decision.kind is DecisionKind.FAIL_JOB:
        assert decision.rule == "fail_when_restarts_are_used_up"
        return None, max(furthest, reached)
    assert decision.action is not None
    return decision.action.next, max(furthest, reached)


def job_spec(max_restarts: int) -> JobSpec:
    return JobSpec("job", ("t.py",), "/", nnodes=2, max_restarts=max_restarts)


@given(
    st.integers(0, 5),
    st.integers(0, 50),
    st.lists(st.builds(Life, st.integers(0, 30), st.integers(0, 30), st.floats(0.5, 3000.0)), min_size=6, max_size=6),
)
def test_no_crash_loop_without_progress_outlives_its_restarts(
    max_restarts: int, first_steps: int, lives: list[Life]
) -> None:
    spec = job_spec(max_restarts)
    plan, furthest = end_of(None, Life(0, first_steps, 5.0), -1, spec)
    restarts = 0
    for life in lives:
        if plan is None:
            break
        restarts += 1
        redone = life.back if furthest >= life.back else furthest + 1
        capped = msgspec.structs.replace(life, steps=min(life.steps, redone))  # never past the furthest step
        plan, furthest = end_of(plan, capped, furthest, spec)
    assert plan is None and restarts == max_restarts


@given(
    st.integers(1, 5),
    st.lists(
        st.one_of(
            st.builds(Life, st.integers(0, 30), st.integers(40, 200), st.floats(0.5, 50.0)),
            st.builds(Life, st.just(0), st.integers(1, 9), st.floats(60.0, 50_000.0)),
        ),
        min_size=7,
        max_size=30,
    ),
)
def test_failures_that_each_follow_progress_never_end_a_job(max_restarts: int, lives: list[Life]) -> None:
    spec = job_spec(max_restarts)
    plan, furthest = end_of(None, lives[0], -1, spec)
    for number, life in enumerate(lives[1:], start=2):
        plan, furthest = end_of(plan, life, furthest, spec)
        assert plan is not None and plan.restarts_used == 1 and plan.restart_count == number
