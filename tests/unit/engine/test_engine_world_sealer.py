"""What happens if a world manifest cannot be written: which errors are retried, and which are reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.jobs.placements import make_placement

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.counters import Counters
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.opening import open_persistent
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing.world_sealer import WorldSealer
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import StorageFull
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

SETTINGS = EngineSettings(seal_timeout_s=3600.0, scan_interval_s=0.01)
PLACEMENT = make_placement({"a": (0,)})


class Sealing:
    """A sealer for a store without shards."""

    def __init__(self, folder: Path, settings: EngineSettings = SETTINGS) -> None:
        spec = CheckpointSpec(persistent_dir=str(folder), persistent_every_steps=1)
        self.disk = open_persistent(str(folder), job="job", settings=SETTINGS, ranks=(0,))
        self.counters = Counters()
        self.failures: list[tuple[int, str]] = []
        self.failed = threading.Event()
        self.sealer = WorldSealer(
            HostGeneration(Configure(Fence(1, 1), "a", PLACEMENT, spec), "a"),
            self.disk,
            counters=self.counters,
            settings=settings,
            clock=SystemClock(),
            on_report=lambda report: None,
            on_failure=self._fail,
        )
        self.sealer.start()

    def _fail(self, rank: int, step: int, message: str) -> None:
        self.failures.append((step, message))
        self.failed.set()


@pytest.fixture
def sealing(tmp_path: Path) -> Iterator[Sealing]:
    made = Sealing(tmp_path)
    yield made
    made.sealer.stop()


def tried(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> threading.Semaphore:
    """Released at each attempt to write a world manifest, which raises `error` if there is one."""
    times, seal = threading.Semaphore(0), ShardStore.seal

    def count(store: ShardStore, generation: int, step: int, world_size: int) -> None:
        times.release()
        if error is not None:
            raise error
        seal(store, generation, step, world_size)

    monkeypatch.setattr(ShardStore, "seal", count)
    return times


def test_a_full_store_is_reported_at_once_and_not_waited_for(sealing: Sealing, monkeypatch: pytest.MonkeyPatch) -> None:
    times = tried(monkeypatch, StorageFull("It is full.", hint="free space there"))
    sealing.sealer.seal(7)
    assert sealing.failed.wait(60.0)
    assert sealing.sealer.drain(60.0)
    assert times.acquire(timeout=60.0) and not times.acquire(blocking=False)
    assert [step for step, _ in sealing.failures] == [7]
    assert "free space there" in sealing.failures[0][1]
    assert sealing.counters.snapshot() == {"persistent_seal_failures": 1}


def test_a_seal_that_a_new_generation_cuts_short_is_no_failure(
    sealing: Sealing, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = tried(monkeypatch)
    sealing.sealer.seal(7)
    for _ in range(3):  # retried: its shards are not visible
        assert times.acquire(timeout=60.0)
    sealing.sealer.stop()
    assert sealing.sealer.drain(60.0)
    assert sealing.failures == []
    assert sealing.counters.snapshot() == {}


@pytest.mark.parametrize("error", [MemoryError(), KeyError("a fault of its own")])
def test_a_sealer_outlives_what_nobody_expected_while_it_seals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    times = tried(monkeypatch, error)
    sealing = Sealing(tmp_path, msgspec.structs.replace(SETTINGS, seal_timeout_s=0.0))
    try:
        for step in (7, 8):
            sealing.sealer.seal(step)
            assert sealing.sealer.drain(60.0)
            assert times.acquire(timeout=60.0)
        assert [step for step, _ in sealing.failures] == [7, 8]
        assert type(error).__name__ in sealing.failures[0][1]
        assert sealing.counters.snapshot() == {"persistent_seal_failures": 2}
    finally:
        sealing.sealer.stop()


def test_a_sealer_outlives_what_nobody_expected_elsewhere(sealing: Sealing, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, sealed_steps = threading.Event(), ShardStore.sealed_steps

    def fail_once(store: ShardStore, *arguments: Any, **named: Any) -> tuple[int, ...]:  # noqa: ANN401 - handed on
        if not failing.is_set():
            failing.set()
            raise MemoryError
        return sealed_steps(store, *arguments, **named)

    times = tried(monkeypatch, StorageFull("It is full.", hint=""))
    monkeypatch.setattr(ShardStore, "sealed_steps", fail_once)
    sealing.sealer.seal(7)
    assert sealing.sealer.drain(60.0)
    sealing.sealer.seal(8)
    assert sealing.sealer.drain(60.0)
    assert times.acquire(timeout=60.0)
    assert any("MemoryError" in message for _, message in sealing.failures)
    assert sealing.sealer._thread.is_alive
