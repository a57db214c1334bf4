"""Faults that wait for a phase, as a rank's beacon tells it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import NotFound, UsageError
from flyball.contracts.on_host.segments import beacon_path
from flyball.sdk.beacon import BeaconWriter, create_beacon
from host_daemon.store.database import HostDatabase
from simulator.inject.host_files import HostFiles, RecordedWorker
from simulator.inject.kinds import phases
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.kind import FaultSite
from simulator.inject.processes import look_at

KIND = KINDS["preempt"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostFiles:
    """A host with one rank, which is this process; its second generation has no beacon yet."""
    folder = tmp_path / "host-a"
    folder.mkdir()
    (folder / "VERSION").write_text("1\n")
    HostDatabase(folder / "daemon.sqlite").close()
    workers = [RecordedWorker("gpt", generation, 0, os.getpid(), 1) for generation in (2, 1)]
    monkeypatch.setattr(HostFiles, "workers", lambda _: workers)
    monkeypatch.setattr(HostFiles, "process_of", lambda *_: look_at(os.getpid()))
    monkeypatch.setattr(HostFiles, "segment_prefix", lambda _: tmp_path / "fb")
    return HostFiles(folder)


def beacon(host: HostFiles, generation: int) -> BeaconWriter:
    path = beacon_path(str(host.segment_prefix()), "gpt", generation, 0)
    create_beacon(path)
    return BeaconWriter(path)


def site(host: HostFiles, phase: str) -> FaultSite:
    return FaultSite(None, SystemClock(), "a1", host_id="host-a", files=host, values=KIND.values({"phase": phase}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("phase", "generation"), [("checkpoint", 1), ("restoring", 2)])
def test_a_notice_comes_in_the_phase_that_was_asked_for(host: HostFiles, phase: str, generation: int) -> None:
    training = beacon(host, 1)
    training.phase(Phase.STEP)
    plan = json.loads(json.dumps(KIND.plan(site(host, phase))))
    notice = host.root / "preemption-notice.json"
    injecting = threading.Thread(target=KIND.inject, args=(plan,))
    injecting.start()
    injecting.join(0.05)
    assert injecting.is_alive() and not notice.exists()
    rank = training if generation == 1 else beacon(host, generation)
    rank.phase(Phase[phase.upper()])
    injecting.join(60.0)
    assert notice.exists()
    KIND.undo(plan)
    assert not notice.exists()


def test_stops_need_a_time_from_one_to_the_next(host: HostFiles) -> None:
    slow = KINDS["engine-slow"]
    values = slow.values({"period_s": "0"})
    with pytest.raises(UsageError, match="period_s must be above 0"):
        slow.with_duty({}, FaultSite(None, SystemClock(), "a1", host_id="host-a", files=host, values=values))  # type: ignore[arg-type,attr-defined]


def test_a_phase_that_does_not_come_leaves_nothing(host: HostFiles) -> None:
    beacon(host, 1).phase(Phase.STEP)
    with pytest.raises(NotFound, match="came into the phase eval within 0 s: nothing was done"):
        phases.wait_for_phase(host, str(host.segment_prefix()), Phase.EVAL, timeout_s=0.05)


def test_a_phase_that_there_is_not_is_refused(host: HostFiles) -> None:
    with pytest.raises(UsageError, match="no phase 'lunch'") as raised:
        KIND.plan(site(host, "lunch"))
    assert "checkpoint" in str(raised.value.hint)
