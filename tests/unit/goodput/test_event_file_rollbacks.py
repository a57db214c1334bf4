"""A trainer that goes back to an earlier step without a restart, in its event file."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from support.stores.event_files import end_process, of_kind, write_out

from flyball.contracts.clock import SystemClock
from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import encode
from flyball.sdk.event_generation import Launch, enter
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity, read_identity
from goodput.calculator import GoodputReport, calculate
from goodput.read.event_files import read_logs

pytestmark = pytest.mark.usefixtures("patient_close")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> WorkerIdentity:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return read_identity({"FLYBALL_JOB": "llama"})


def pass_time() -> None:
    """A float of today's seconds has a resolution of 0.24 us: what takes less may last 0 s."""
    end_s = SystemClock.wall_s() + 1e-5
    while SystemClock.wall_s() < end_s:
        pass


def train(job: Job, *steps: int) -> None:
    for step in steps:
        pass_time()
        job.step(step)


def report(path: Path) -> GoodputReport:
    found = calculate(read_logs([path]).events)
    assert sum(found.seconds_by_category.values()) == pytest.approx(found.elapsed_s)
    return found


@pytest.mark.parametrize("how", ["job.restore", "a checkpoint of its own", "without a word"])
def test_repeated_steps_are_recomputed(how: str, alone: WorkerIdentity, path: Path) -> None:
    with Job(alone, events=str(path)) as job:
        assert job.restore({}) == 0
        train(job, *range(10))
        if how == "job.restore":
            job.restore({})
        else:
            with job.phase("restore") if how == "a checkpoint of its own" else nullcontext():
                pass_time()
        train(job, *range(4, 20))

    found = report(path)
    assert (found.steps.kept, found.steps.recomputed, found.steps.newest) == (20, 6, 19)
    (incident,) = found.incidents
    assert (incident.cause, incident.outcome, incident.lost_steps) == ("rollback", "resolved", 6)
    assert found.interruptions == 1 and found.outcome == "succeeded"
    assert found.seconds_by_category["recomputed"] > 0
    assert (incident.seconds_by_category.get("restore", 0.0) > 0) == (how != "without a word")


def test_a_rollback_is_logged_in_its_place_at_any_time(alone: WorkerIdentity, path: Path) -> None:
    """The thread runs constantly while rollbacks follow each other quickly: every step keeps its generation."""
    job = Job(alone, events=str(path))
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            write_out(job)

    looking = threading.Thread(target=look)
    looking.start()
    for start in range(20):
        with job.phase("restore"):
            pass
        train(job, *range(start, start + 10))
    done.set()
    looking.join()
    job.close()

    logged: dict[int, list[int]] = {}
    for event in of_kind(path, EventKind.STEPS):
        first = event.data["first_step"]
        logged.setdefault(event.generation, []).extend(range(first, first + len(event.data["completed_at"])))
    assert logged == {start + 1: list(range(start, start + 10)) for start in range(20)}
    assert report(path).steps.kept == 29


def test_a_repeated_step_number_is_not_a_rollback(alone: WorkerIdentity, path: Path) -> None:
    with Job(alone, events=str(path)) as job:
        train(job, 0, 0, 1, 1, 2)
    assert len(of_kind(path, EventKind.GENERATION_STARTED)) == 1


def test_a_restart_after_a_rollback_is_a_restart(alone: WorkerIdentity, path: Path) -> None:
    first = Job(alone, events=str(path))
    train(first, 0, 1, 2, 1, 2)
    end_process(first)  # its process ends
    second = Job(replace(alone, world_size=2), events=str(path))
    train(second, 1, 2, 3)
    second.close()
    started = of_kind(path, EventKind.GENERATION_STARTED)
    assert [(e.generation, e.incident_id) for e in started] == [(1, ""), (2, "rollback-2"), (3, "restart-3")]
    first.close()


def test_ranks_that_go_back_together_share_the_generation(tmp_path: Path) -> None:
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"}
    folder = tmp_path / "events"
    jobs = [Job(read_identity({**both, "RANK": str(rank)}), events=f"{folder}/") for rank in range(2)]
    for start in (0, 2, 1):
        for job in jobs:
            with job.phase("restore"):
                pass
            train(job, *range(start, start + 5))
    for job in jobs:  # the first finishes everything before the other begins
        job.close()

    started = of_kind(folder, EventKind.GENERATION_STARTED)
    assert [(e.generation, e.incident_id) for e in started] == [(1, ""), (2, "rollback-2"), (3, "rollback-3")]
    logged = {(e.generation, e.rank, e.data["first_step"]) for e in of_kind(folder, EventKind.STEPS)}
    assert logged == {(n, rank, start) for n, start in ((1, 0), (2, 2), (3, 1)) for rank in (0, 1)}
    found = report(folder)
    assert (found.steps.kept, found.steps.recomputed, found.interruptions) == (6, 3 + 6, 2)


def test_a_rank_finds_its_rollback_among_those_of_others(path: Path) -> None:
    def write(events: Sequence[Event]) -> None:
        with path.open("ab") as file:
            file.writelines(encode(event) + b"\n" for event in events)

    def entered(key: str, rollback: int) -> tuple[int, bool]:
        launch = Launch("llama", key, 1.0, 2.0, rank=0, world_size=2, given=0, rollback=rollback)
        found = enter(path, launch, write, lock_timeout_s=60.0)
        return found.generation, found.began

    assert [entered("a", n) for n in (0, 1, 2)] == [(1, True), (2, True), (3, True)]
    assert [entered("a", n) for n in (0, 1, 2)] == [(1, False), (2, False), (3, False)]
    assert [entered("b", n) for n in (0, 1)] == [(4, True), (5, True)]


@pytest.mark.parametrize("first", [0, 1])
def test_numbers_that_start_over_with_an_epoch_are_not_a_rollback(
    first: int, alone: WorkerIdentity, path: Path
) -> None:
    with Job(alone, events=str(path)) as job:
        for _ in range(5):
            train(job, *range(first, first + 20))

    found = report(path)
    assert (found.steps.kept, found.steps.recomputed, found.interruptions) == (100, 0, 0)
    assert len(of_kind(path, EventKind.GENERATION_STARTED)) == 1
    assert [note for note in found.notes if "start over 4 times" in note]
