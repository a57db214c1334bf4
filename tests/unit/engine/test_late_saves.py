"""Saves that training had to wait for: counted, shown on their handles, and reported from time to time."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.hosts.engine_reports import signals_of
from support.jobs.rank_alone import slots_of
from support.stores.shards import make_manifest

from ckpt_engine.contracts.notices import LATE_S, MAX_NOTICE_BYTES, Captured, Notice, SaveWaited
from ckpt_engine.format import manifest as manifests
from ckpt_engine.host.save_reports import REPORT_EVERY_S, LateSaveLog
from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.on_host.engine_wire import EngineReply, LateSaves
from flyball.contracts.reports.signals import SaveLate
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity


def waited(step: int, waited_s: float = 0.2, *, rank: int = 0) -> SaveWaited:
    return SaveWaited(job="job", rank=rank, generation=1, step=step, waited_s=waited_s)


def test_the_first_late_save_is_reported_at_once_and_later_ones_together() -> None:
    log = LateSaveLog("job")
    log.note(waited(3), 1000.0)
    log.note(waited(3, rank=1), 1000.5)
    for step in range(4, 500):
        log.note(waited(step, 0.9 if step == 40 else 0.2), 1000.0 + step / 10)
    assert [(late.rank, late.count, late.step) for late in log.newest()] == [(0, 1, 3), (1, 1, 3)]
    log.note(waited(500), 1000.0 + REPORT_EVERY_S)
    assert log.newest()[-1] == LateSaves("job", 1, 0, 500, 0.9, 497, 1000.0 + REPORT_EVERY_S)
    log.note(waited(501), 500.0)
    assert log.newest()[-1].count == 1, "a clock that was set back delays no report"


def test_the_rest_is_reported_when_the_generation_ends() -> None:
    log = LateSaveLog("job")
    for step in (3, 4, 5):
        log.note(waited(step, 0.2 * step), 1000.0 + step)
    log.note(waited(3, rank=1), 1000.0)
    for _ in range(2):
        log.report_rest(1010.0)
    assert [(late.rank, late.count, late.step, late.waited_s) for late in log.newest()] == [
        (0, 1, 3, 0.2 * 3),
        (1, 1, 3, 0.2),
        (0, 2, 5, 1.0),
    ]


class SlowEngine:
    """The engine of a rank: it commits what was captured after a while, and remembers which saves were waited for."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(identity.engine_notify)
        self._slots = slots_of(identity, create=True)
        self._slots.control.begin_world(identity.generation, -1)
        self.delay_s = 0.0
        self.received: list[tuple[int, float]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while notice := self._socket.recv(MAX_NOTICE_BYTES):
            told = wire.decode(notice, Notice)  # type: ignore[arg-type]  # a union of tagged structs
            if isinstance(told, Captured):
                commit = threading.Timer(self.delay_s, self._commit, (told.slot,))
                commit.daemon = True
                commit.start()
            elif isinstance(told, SaveWaited):
                self.received.append((told.step, told.waited_s))

    def _commit(self, index: int) -> None:
        view = self._slots.control.slot(index)
        made = make_manifest(self._slots.payload(index), view.step, generation=view.generation)
        assert self._slots.commit(view, manifests.encode(made))
        self._slots.control.note_replicated(view.step)
        self._slots.control.advance_world(view.step)

    def close(self, identity: WorkerIdentity) -> None:
        """Returns when it has received everything that was sent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", identity.engine_notify)
        self._thread.join(120.0)
        assert not self._thread.is_alive()
        self._socket.close()


@pytest.fixture
def identity(lone_rank: WorkerIdentity, tmp_path: Path) -> WorkerIdentity:
    """A rank beside an engine."""
    checkpoint = CheckpointSpec(save_timeout_s=120.0)
    return replace(lone_rank, checkpoint=checkpoint, engine_notify=str(tmp_path / "notify"))


def test_a_save_that_waits_for_a_slot_shows_it_on_its_handle_and_is_counted(identity: WorkerIdentity) -> None:
    engine = SlowEngine(identity)
    with Job(identity) as job:
        handles = [job.save(0, {"t": torch.ones(10)})]
        engine.delay_s = 3 * LATE_S
        while not job.late_saves and len(handles) < 100:  # if this thread is delayed, a save finds the slot free
            handles.append(job.save(len(handles), {"t": torch.ones(10)}))
        slow = [(handle.step, handle.waited_s) for handle in handles if handle.waited_s >= LATE_S]
        engine.close(identity)
        assert slow and job.late_saves == len(slow) and [sent for sent in engine.received if sent[1] >= LATE_S] == slow
        assert job.failed_saves == 0


def test_the_daemon_makes_one_signal_of_a_report_that_its_engine_repeats() -> None:
    late = [LateSaves("job", 1, 0, step, 0.4, 3, 1000.0 + step) for step in range(2)]
    answers = (late[:1], late, late)
    put = signals_of(*(EngineReply(ok=True, late=tuple(answer)) for answer in answers))
    assert put == [SaveLate("job", 1, 0, step, 0.4, 3) for step in range(2)]
