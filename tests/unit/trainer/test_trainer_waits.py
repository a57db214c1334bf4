"""Training that waits for its saves does not look stalled, as long as the engine is alive and the wait is finite."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.clocks.waits import until
from support.jobs.rank_alone import slots_of

from ckpt_engine.trainer.commit_link import EngineLink
from flyball.contracts.cluster import Phase
from flyball.sdk.beacon import BeaconReader, create_beacon
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

DEADLINE_S = 60.0


class Stamps:
    """The times at which the beacon moved in the checkpoint phase."""

    def __init__(self, path: str) -> None:
        self._beacon = BeaconReader(path)
        self.seen: set[int] = set()

    def look(self) -> int:
        """The number of different stamps so far."""
        if self.phase is Phase.CHECKPOINT:  # an earlier snapshot may have the previous phase's stamp
            self.seen.add(self._beacon.snapshot().moved_ns)
        return len(self.seen)

    @property
    def phase(self) -> Phase:
        return self._beacon.snapshot().phase

    def close(self) -> None:
        self._beacon.close()


@pytest.fixture
def identity(lone_rank: WorkerIdentity, tmp_path: Path) -> WorkerIdentity:
    beacon = str(tmp_path / "beacon")
    create_beacon(beacon)
    return replace(lone_rank, beacon=beacon, engine_notify=str(tmp_path / "notify.sock"))


@pytest.fixture
def engine(identity: WorkerIdentity) -> Iterator[socket.socket]:
    """An engine as a trainer sees it: somebody holds the notify socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(identity.engine_notify)
        yield notify


@pytest.fixture
def job(identity: WorkerIdentity, engine: socket.socket) -> Iterator[Job]:
    """A job with one save that the engine has not committed yet."""
    with Job(identity) as made:
        made.step(0)
        assert made.save(0, {"t": torch.ones(10)}).staged
        yield made


@pytest.fixture
def stamps(identity: WorkerIdentity, job: Job) -> Iterator[Stamps]:
    made = Stamps(identity.beacon)
    assert made.phase is Phase.STEP
    yield made
    made.close()


def in_thread(wait: Callable[[float], bool], timeout_s: float) -> Callable[[], bool]:
    """Start a wait; call the result to join it and get its result."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(wait(timeout_s)), daemon=True)
    thread.start()

    def ended() -> bool:
        thread.join(DEADLINE_S)
        return answers == [True]

    return ended


def commit(identity: WorkerIdentity) -> None:
    """Commit as the engine does."""
    control = slots_of(identity).control
    control.begin_world(identity.generation, -1)
    control.note_replicated(0)


def test_a_wait_for_a_slow_engine_does_not_look_stalled(identity: WorkerIdentity, job: Job, stamps: Stamps) -> None:
    ended = in_thread(job.wait_until_finished, 2 * DEADLINE_S)
    until(lambda: stamps.look() > 3)
    commit(identity)
    assert ended() and stamps.phase is Phase.STEP


@pytest.mark.parametrize(("timeout_s", "is_there"), [(2 * DEADLINE_S, False), (math.inf, True)])
def test_a_wait_for_a_dead_engine_or_without_an_end_is_found(
    identity: WorkerIdentity,
    engine: socket.socket,
    job: Job,
    stamps: Stamps,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float,
    is_there: bool,
) -> None:
    is_alive, asked = EngineLink.alive.fget, []  # type: ignore[attr-defined]  # it is a property

    def alive(link: EngineLink) -> bool:
        asked.append(is_alive(link))
        return bool(asked[-1])

    monkeypatch.setattr(EngineLink, "alive", property(alive))
    if not is_there:
        engine.close()
    ended = in_thread(job.wait_until_finished, timeout_s)
    until(lambda: stamps.look() > 0 and len(asked) > 3)
    assert stamps.look() == 1 and set(asked) == {is_there}
    commit(identity)
    assert ended()


def test_a_wait_that_was_in_vain_is_over_for_the_beacon_too(job: Job, stamps: Stamps) -> None:
    assert not job.wait_until_finished(0.01)
    assert stamps.phase is Phase.STEP
