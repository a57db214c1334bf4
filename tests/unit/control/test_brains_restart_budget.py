"""The restart budget: failures without progress in between count, progress refills it."""

from __future__ import annotations

import msgspec
import pytest

from flyball.contracts.cluster import HostRanks, Phase
from flyball.contracts.decisions import Incident, IncidentState
from flyball.contracts.reports.signals import WorkerExited
from services.controller.round.guardrails import Budget, budget_after, progress_of
from services.controller.round.view import GenerationView, PolicySettings, RankView

SETTINGS = PolicySettings()
STARTED = 1_000.0


def generation(*steps: int, ran_s: float = 5.0, phase: Phase = Phase.STEP, **more: object) -> GenerationView:
    """One whose ranks got as far as `steps`; the last of them was then killed."""
    ranks = [RankView(number, "a", step, phase, STARTED + ran_s) for number, step in enumerate(steps)]
    if ranks:
        killed = WorkerExited("job", 4, len(steps) - 1, 7, None, 9, steps[-1], None)
        ranks[-1] = msgspec.structs.replace(ranks[-1], exited=killed, exited_at=STARTED + ran_s)
    facts: dict[str, object] = {
        "generation": 4,
        "parent": 3,
        "lineage": (),
        "hosts": (HostRanks("a", "ip", "a:7", tuple(range(len(steps)))),),
        "peers": {},
        "started_at": STARTED,
        "restore_step": 100,
        "restart_count": 5,
        "restarts_used": 2,
        "furthest_step": 120,
        "ranks": tuple(ranks),
    }
    return GenerationView(**{**facts, **more})  # type: ignore[arg-type]  # a builder


def incident(cause: str = "worker_killed", number: int = 4) -> Incident:
    return Incident("inc-1", "job", "a", cause, IncidentState.DECIDING, STARTED, STARTED, "It failed.", number)


@pytest.mark.parametrize(
    ("failed", "progress"),
    [
        (generation(130, 130), "10 new steps"),
        (generation(129, 129), ""),
        (generation(500, 121), ""),  # one rank went ahead alone
        (generation(121, 121, ran_s=60.0), "1 new step in 60 s"),
        (generation(123, 122, ran_s=75.0), "2 new steps in 75 s"),
        (generation(120, 120, ran_s=4000.0), ""),  # as far as before, however long it took
        (generation(110, 110, furthest_step=-1), "10 new steps"),  # what was restored is no progress
        (generation(105, 105, furthest_step=-1), ""),
        (generation(9, 9, furthest_step=-1, restore_step=None), "10 new steps"),  # step 0 is one of them
        (generation(8, 8, furthest_step=-1, restore_step=None), ""),
        (generation(121, 121, ran_s=59.9), ""),
        (generation(140, 140, started_at=0.0), ""),
        (generation(), ""),
    ],
)
def test_progress_is_what_all_ranks_did_beyond_all_generations_before(failed: GenerationView, progress: str) -> None:
    assert progress_of(failed, SETTINGS) == progress


def test_a_script_without_steps_proves_itself_by_time() -> None:
    unwatched = {"phase": Phase.STARTING, "restore_step": None, "furthest_step": -1}
    assert progress_of(generation(-1, -1, ran_s=599.0, **unwatched), SETTINGS) == ""  # type: ignore[arg-type]
    assert progress_of(generation(-1, -1, ran_s=600.0, **unwatched), SETTINGS) == "600 s without a failure"  # type: ignore[arg-type]
    attached = unwatched | {"phase": Phase.STEP}
    assert progress_of(generation(-1, -1, ran_s=9999.0, **attached), SETTINGS) == ""  # type: ignore[arg-type]
    restored = unwatched | {"restore_step": 100}
    assert progress_of(generation(-1, -1, ran_s=9999.0, **restored), SETTINGS) == ""  # type: ignore[arg-type]


def test_a_failure_after_progress_is_the_first_of_a_new_count() -> None:
    assert budget_after(generation(130, 131), incident(), SETTINGS) == Budget(6, 1, 131, "10 new steps")
    assert budget_after(generation(130, 131, restarts_used=0), incident(), SETTINGS) == Budget(6, 1, 131)  # no news


def test_a_failure_without_progress_counts_on() -> None:
    assert budget_after(generation(121, 123), incident(), SETTINGS) == Budget(6, 3, 123)
    assert budget_after(generation(90, 95), incident(), SETTINGS) == Budget(6, 3, 120)


def test_what_the_machines_caused_burns_nothing_and_keeps_the_progress() -> None:
    silent = incident("host_silent")
    assert budget_after(generation(124, 125), silent, SETTINGS) == Budget(5, 2, 120)  # the 4 steps count later
    assert budget_after(generation(130, 131), silent, SETTINGS) == Budget(5, 0, 131, "10 new steps")
    assert budget_after(generation(124, 125), incident(number=3), SETTINGS) == Budget(5, 2, 120)
    assert budget_after(generation(started_at=0.0), incident(), SETTINGS) == Budget(5, 2, 120)


def test_a_generation_of_an_older_release_has_used_what_it_counted() -> None:
    older = generation(101, 101, restart_count=3, restarts_used=-1, furthest_step=-1)
    assert budget_after(older, incident(), SETTINGS) == Budget(4, 4, 101)
    assert budget_after(generation(130, 130, restarts_used=-1), incident(), SETTINGS).used == 1


def test_the_time_of_a_hang_ends_with_the_last_report() -> None:
    hung = generation(121, 121, ran_s=70.0)
    alive = tuple(msgspec.structs.replace(rank, exited=None, exited_at=0.0) for rank in hung.ranks)
    assert progress_of(msgspec.structs.replace(hung, ranks=alive), SETTINGS) == "1 new step in 70 s"


def _exited(after_s: float, *, step: int = 121, phase: Phase | None = None) -> dict[str, object]:
    return {
        "exited": WorkerExited("job", 4, 0, 7, None, 9, step, None, last_phase=phase),
        "exited_at": STARTED + after_s,
    }


def test_a_generation_ran_until_its_first_worker_ended() -> None:
    failed = generation(121, 121, ran_s=90.0)
    assert progress_of(failed, SETTINGS) == "1 new step in 90 s"
    first = msgspec.structs.replace(failed.ranks[0], **_exited(20.0))
    assert progress_of(msgspec.structs.replace(failed, ranks=(first, failed.ranks[1])), SETTINGS) == ""


@pytest.mark.parametrize(
    ("step", "at_its_end", "shows_none"),
    [
        (-1, {"step": -1}, True),
        (-1, {"step": -1, "phase": Phase.STARTING}, True),
        (-1, {"step": -1, "phase": Phase.STEP}, False),  # it was on its way to its first step
        (-1, {"step": 0}, False),
        (0, {"step": 0}, False),
    ],
)
def test_a_script_shows_no_steps_if_neither_its_reports_nor_its_end_do(
    step: int, at_its_end: dict[str, object], shows_none: bool
) -> None:
    failed = generation(step, ran_s=4000.0, phase=Phase.STARTING, restore_step=None, furthest_step=50)
    rank = msgspec.structs.replace(failed.ranks[0], **_exited(4000.0, **at_its_end))
    said = progress_of(msgspec.structs.replace(failed, ranks=(rank,)), SETTINGS)
    assert said == ("4000 s without a failure" if shows_none else "")


def test_the_furthest_step_is_also_that_of_a_worker_whose_end_was_seen_before_its_report() -> None:
    failed = generation(121, 121)
    rank = msgspec.structs.replace(failed.ranks[0], **_exited(5.0, step=140))
    left = msgspec.structs.replace(failed, ranks=(rank, failed.ranks[1]))
    assert budget_after(left, incident(), SETTINGS).furthest_step == 140


@pytest.mark.parametrize(("days", "used"), [(0.9, 3), (1.0, 2), (2.5, 1), (30.0, 1)])
def test_a_bad_night_is_forgotten_day_by_day(days: float, used: int) -> None:
    """Two restarts were used before a generation that ran for days without being far enough to refill the budget."""
    slow = generation(120, 120, ran_s=86_400.0 * days)
    assert budget_after(slow, incident(), SETTINGS).used == used
