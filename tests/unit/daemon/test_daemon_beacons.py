"""Reading beacons: every step once, even if reports fail or daemons restart."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.clocks.waits import until

from flyball.contracts import wire
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import RankPosition
from flyball.contracts.on_host.segments import beacon_path
from flyball.contracts.reports.training_health import RankCompute, RankLoss
from flyball.sdk.beacon import BeaconWriter, Mark
from host_daemon.workers import beacons as beacons_module
from host_daemon.workers.beacons import MAX_WAITING_STEPS, STEPS_PER_REPORT, Beacons


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "flyball-test")


def watched(prefix: str, rank: int = 0, generation: int = 1) -> tuple[Beacons, BeaconWriter]:
    beacons = Beacons(shm_prefix=prefix, clock=SystemClock())
    return beacons, add(beacons, prefix, rank, generation)


def add(beacons: Beacons, prefix: str, rank: int, generation: int = 1) -> BeaconWriter:
    beacons.create("job", generation, rank)
    beacons.watch("job", generation, rank, pid=100 + rank, spawned_at=1_000.0)
    return BeaconWriter(beacon_path(prefix, "job", generation, rank))


def steps(readings) -> list[int]:
    return [run.first_step + i for run in readings.steps for i in range(len(run.completed_at))]


def test_every_step_is_taken_once_and_consecutive_ones_share_a_record(prefix):
    beacons, writer = watched(prefix)
    before = SystemClock().wall_s()
    for step in (0, 1, 2):
        writer.step(step)
    assert beacons.sample()
    after = SystemClock().wall_s()  # `take` reads two clocks, and may be delayed in between
    taken = beacons.take()
    assert [(r.first_step, len(r.completed_at)) for r in taken.steps] == [(0, 3)]
    assert list(taken.steps[0].completed_at) == sorted(taken.steps[0].completed_at)
    assert before - 1.0 < taken.steps[0].completed_at[-1] < after + 1.0  # one clock is derived from the other
    for step in (10, 11, 13):
        writer.step(step)
    assert not beacons.sample()  # no longer one of its first steps
    assert [(r.first_step, len(r.completed_at)) for r in beacons.take().steps] == [(10, 2), (13, 1)]
    assert beacons.take().steps == ()


def test_steps_of_a_failed_report_come_in_order_with_the_next(prefix):
    beacons, writer = watched(prefix)
    writer.step(0)
    writer.step(1)
    beacons.sample()
    beacons.put_back(beacons.take())
    writer.step(2)
    beacons.sample()
    again = beacons.take()
    assert steps(again) == [0, 1, 2]
    assert len(again.marks) == 1


def test_a_restarted_daemon_continues_after_the_last_reported_step(prefix):
    beacons, writer = watched(prefix)
    writer.step(0)
    writer.step(1)
    beacons.sample()
    beacons.arrived(beacons.take())
    writer.step(2)
    beacons.sample()
    beacons.take()  # killed before sending it
    successor = Beacons(shm_prefix=prefix, clock=SystemClock())
    successor.watch("job", 1, 0, pid=100, spawned_at=1_000.0)
    writer.step(3)
    successor.sample()
    assert steps(successor.take()) == [2, 3]


def test_waiting_steps_are_bounded_and_one_report_takes_a_part(prefix):
    beacons, writer = watched(prefix)
    for step in range(MAX_WAITING_STEPS + 500):
        writer.step(step)
        if step % 100 == 0:
            beacons.sample()
    beacons.sample()
    first = steps(beacons.take())
    assert first == list(range(500, 500 + STEPS_PER_REPORT))
    assert steps(beacons.take())[0] == 500 + STEPS_PER_REPORT


def test_positions_are_those_of_the_newest_generation_even_after_death(prefix):
    beacons, writer = watched(prefix)
    other = add(beacons, prefix, 1)
    writer.step(7)
    writer.phase(Phase.DONE)
    other.step(6)
    assert beacons.positions("job", upto_generation=1) == (RankPosition(0, -1), RankPosition(1, -1))
    beacons.worker_ended("job", 1, 0)
    beacons.worker_ended("job", 1, 1)
    assert beacons.positions("job", upto_generation=5) == (RankPosition(0, 7), RankPosition(1, 6))
    assert beacons.positions("job", upto_generation=0) == ()
    assert beacons.last_step("job", 1, 0) == 7
    assert (beacons.last_phase("job", 1, 0), beacons.last_phase("job", 2, 0)) == (Phase.DONE, None)
    assert beacons.statuses() == ()


def test_status_shows_phase_step_and_the_age_of_the_beacon(prefix):
    beacons, writer = watched(prefix)
    (status,) = beacons.statuses()
    assert (status.step, status.phase, status.pid) == (-1, Phase.STARTING, 100)
    assert status.beacon_age_s > 1e6  # since it was spawned
    writer.step(4)
    writer.phase(Phase.EVAL)
    beacons.sample()
    (status,) = beacons.statuses()
    assert (status.step, status.phase) == (4, Phase.EVAL)
    assert 0.0 <= status.beacon_age_s < 60.0


def test_times_are_reported_when_new_and_do_not_change(prefix):
    beacons, writer = watched(prefix)
    beacons.sample()
    assert [m.spawned_at for m in beacons.take().marks] == [1_000.0]
    assert beacons.take().marks == ()
    writer.mark(Mark.ATTACHED)
    beacons.sample()
    (first,) = beacons.take().marks
    assert first.attached_at > 0.0 and first.first_step_at == 0.0
    writer.step(0)
    beacons.sample()
    (second,) = beacons.take().marks
    assert second.attached_at == first.attached_at and second.first_step_at >= first.attached_at
    writer.add_save_blocked(2_000_000)
    writer.phase(Phase.DATA)
    began_s = time.monotonic()
    until(lambda: time.monotonic() - began_s >= 0.002)  # a beacon reads the clock itself
    writer.phase(Phase.STEP)
    beacons.sample()
    assert beacons.take().marks == ()  # grows with every save: not reported each time
    beacons.worker_ended("job", 1, 0)
    (last,) = beacons.take().marks
    assert last.save_blocked_s == pytest.approx(0.002)
    assert last.data_wait_s >= 0.002


def test_removed_beacons_leave_no_file_and_lose_no_step(prefix, tmp_path):
    beacons, writer = watched(prefix, generation=1)
    newer = add(beacons, prefix, 0, generation=2)
    writer.step(0)
    beacons.worker_ended("job", 1, 0)
    beacons.arrived(beacons.take())
    newer.step(1)
    beacons.remove("job", before_generation=2)
    assert [p.name for p in tmp_path.iterdir()] == [Path(beacon_path(prefix, "job", 2, 0)).name]
    beacons.worker_ended("job", 2, 0)
    beacons.remove("job")
    assert list(tmp_path.iterdir()) == []
    last = beacons.take()
    assert steps(last) == [1]
    beacons.arrived(last)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_that_cannot_record_reported_steps_is_harmless(prefix):
    beacons, writer = watched(prefix)
    writer.step(0)
    beacons.sample()
    Path(beacon_path(prefix, "job", 1, 0) + ".seen").mkdir()  # an OSError, as from a full file system
    beacons.arrived(beacons.take())
    writer.step(1)
    beacons.sample()
    assert steps(beacons.take()) == [1]


def test_the_loss_of_the_lowest_rank_that_has_one_is_reported_when_it_changes(prefix):
    beacons, first = watched(prefix)
    second = add(beacons, prefix, 1)
    first.step(0)
    second.loss(0, 7.0)
    beacons.sample()
    readings = beacons.take()
    assert readings.losses == (RankLoss("job", 1, 1, 0, 7.0),)  # as in a pipeline, where only the last stage has a loss
    first.loss(1, float("nan"))
    second.loss(1, 6.0)
    beacons.sample()
    readings = beacons.take()
    assert readings.losses == (RankLoss("job", 1, 0, 1, "nan"),)
    assert beacons.take().losses == ()
    beacons.put_back(readings)  # the report failed
    assert beacons.take().losses == readings.losses
    first.loss(2, 0.5)
    beacons.worker_ended("job", 1, 0)
    assert beacons.take().losses == (RankLoss("job", 1, 0, 2, 0.5),)  # the last loss of a rank that is gone


def test_how_long_a_rank_computed_is_reported_after_a_few_steps(prefix):
    """From a step until a gradient is ready; without saves, and without steps beside which the rank evaluated."""
    beacons, writer = watched(prefix)
    for step in range(10):
        writer.gradient_ready()
        writer.step(step)
    beacons.sample()
    assert beacons.take().computes == ()  # nine: nothing came before the first step
    writer.phase(Phase.EVAL)
    writer.phase(Phase.STEP)
    writer.gradient_ready()
    writer.step(10)
    beacons.sample()
    assert beacons.take().computes == ()
    writer.gradient_ready()
    writer.add_save_blocked(10**10)  # longer than all of it
    writer.step(11)
    beacons.sample()
    (compute,) = beacons.take().computes
    assert isinstance(compute, RankCompute)
    assert (compute.job, compute.generation, compute.rank, compute.steps) == ("job", 1, 0, 10)
    assert 0.0 <= compute.compute_s < 3600.0
    assert beacons.take().computes == ()


@pytest.mark.parametrize("word", [2, 3, 4, 6, 8, 11, 12, 13, 18, 32, 33])
@pytest.mark.parametrize("value", [-1 - 2**40, 2**62])
def test_what_no_rank_can_have_done_gets_into_no_report(prefix, word, value):
    """The receiver would refuse the whole report, and with it what the host's other jobs did."""
    beacons, writer = watched(prefix)
    writer.loss(0, 1.0)
    writer.step(0)
    assert not beacons.sample() or beacons.take().steps
    writer._words[word] = value
    writer.step(1)
    writer._words[word] = value
    beacons.sample()
    beacons.arrived(beacons.take())
    readings = beacons.take()
    for said in (*readings.steps, *readings.marks, *readings.losses, *readings.computes, *beacons.statuses()):
        assert wire.decode(wire.encode(said), type(said)) == said
    assert beacons.last_step("job", 1, 0) in (0, 1)


def open_descriptors(path: str) -> int:
    links = (str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum(link == path for link in links)


@pytest.mark.parametrize("content", [b"", bytes(8192)])
def test_a_beacon_that_cannot_be_read_is_one_that_stands_until_it_can_be(prefix, content, monkeypatch):
    monkeypatch.setattr(beacons_module, "REOPEN_S", 0.0)
    beacons = Beacons(shm_prefix=prefix, clock=SystemClock())
    path = beacon_path(prefix, "job", 1, 0)
    beacons.create("job", 1, 0)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(content)
    beacons.watch("job", 1, 0, pid=100, spawned_at=1_000.0)
    assert not beacons.sample()
    (status,) = beacons.statuses()
    assert (status.rank, status.step, status.phase) == (0, -1, Phase.STARTING)
    assert status.beacon_age_s > 1_000.0  # so it stalls, and its next worker gets a new beacon
    assert [standing.pid for standing in beacons.standing()] == [100]
    assert beacons.positions("job", upto_generation=1) == () and beacons.last_phase("job", 1, 0) is None
    assert open_descriptors(path) == 0
    Path(path).write_bytes(whole)
    BeaconWriter(path).step(3)
    assert beacons.sample()
    assert steps(beacons.take()) == [3]
    os.truncate(path, 0)
    assert not beacons.sample()
    beacons.worker_ended("job", 1, 0)
    assert beacons.last_step("job", 1, 0) == 3
    assert open_descriptors(path) == 0
    beacons.remove("job")


def test_a_beacon_that_says_what_cannot_be_leaves_no_descriptor_open(prefix):
    beacons, writer = watched(prefix)
    path = beacon_path(prefix, "job", 1, 0)
    writer._words[3] = -5
    writer.close()
    for _ in range(3):
        beacons.watch("job", 1, 0, pid=100, spawned_at=1_000.0)
        assert not beacons.sample()
    assert open_descriptors(path) == 1
    beacons.remove("job")
    assert open_descriptors(path) == 0
