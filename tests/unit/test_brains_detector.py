"""The fault detector: when it speaks, and when it must not."""

from __future__ import annotations

import msgspec
import pytest

from flyball.contracts.cluster import HostFacts, Phase, RankStatus
from flyball.contracts.rank_columns import RankSteps, in_columns, steps_together
from flyball.contracts.signals import (
    EngineStatus,
    HostReturned,
    HostSilent,
    PeerUnreachable,
    RankStalled,
    Report,
    SignalBody,
)
from flyball.contracts.wire import WIRE_VERSION
from services.sensor.fault_detector import DetectorSettings, FaultDetector
from services.sensor.heard_hosts import SilenceSettings

TICK_S = 0.1


def report(
    host: str,
    now: float,
    *,
    interval_s: float = 1.0,
    unreachable: tuple[str, ...] = (),
    ranks: tuple[RankStatus, ...] = (),
    steps: tuple[RankSteps, ...] = (),
    lagged_s: float = 0.0,
) -> Report:
    workers, progress = in_columns(ranks)
    return Report(
        version=WIRE_VERSION,
        incarnation="i1",
        sent_at=now,
        interval_s=interval_s,
        facts=HostFacts(host, "10.0.0.1", "rack", "10.0.0.1:7", 1, "1", 1),
        engine=EngineStatus(alive=True, unreachable_peers=unreachable),
        workers=workers,
        progress=progress,
        completed=steps_together(steps),
        lagged_s=lagged_s,
    )


class Cluster:
    """Hosts that report each second, in one detector."""

    def __init__(self, *hosts: str, settings: DetectorSettings | None = None) -> None:
        self.detector = FaultDetector(settings or DetectorSettings())
        self.reporting = {host: () for host in hosts}
        self.now = 100.0
        self.signals: list[tuple[float, SignalBody]] = []

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now = round(self.now + TICK_S, 6)
            if abs(self.now - round(self.now)) < 1e-6:
                for host, unreachable in self.reporting.items():
                    self.keep(self.detector.observe(report(host, self.now, unreachable=unreachable), self.now))
            self.keep(self.detector.tick(self.now))

    def keep(self, bodies: list[SignalBody]) -> None:
        self.signals += [(self.now, body) for body in bodies]

    def silent(self) -> list[tuple[float, HostSilent]]:
        return [(at, body) for at, body in self.signals if isinstance(body, HostSilent)]


def test_a_witness_makes_it_quick() -> None:
    cluster = Cluster("a", "b")
    cluster.run(10)
    del cluster.reporting["b"]
    cluster.reporting["a"] = ("b",)
    stopped_at = cluster.now
    cluster.run(20)
    ((at, body),) = cluster.silent()
    assert body.host_id == "b" and body.witnesses == ("a",)
    assert 2.9 < at - stopped_at < 3.3  # three intervals
    assert [b for _, b in cluster.signals if isinstance(b, PeerUnreachable)] == [
        PeerUnreachable("b", "The engine of a lost b and cannot connect to it again.")
    ]


def test_without_a_witness_it_takes_three_times_as_long() -> None:
    cluster = Cluster("a", "b")
    cluster.run(10)
    del cluster.reporting["b"]
    stopped_at = cluster.now
    cluster.run(20)
    ((at, body),) = cluster.silent()
    assert body.witnesses == () and 8.9 < at - stopped_at < 9.3


def test_when_nobody_is_heard_of_it_takes_longest() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.run(10)
    cluster.reporting.clear()
    stopped_at = cluster.now
    cluster.run(30)
    assert {body.host_id for _, body in cluster.silent()} == {"a", "b", "c"}
    assert all(14.9 < at - stopped_at < 15.3 for at, _ in cluster.silent())


def test_yellow_comes_before_red() -> None:
    cluster = Cluster("a", "b")
    cluster.run(10)
    assert cluster.detector.suspicion() == ()
    del cluster.reporting["b"]
    cluster.run(2)
    (suspect,) = cluster.detector.suspicion()
    assert suspect.host_id == "b" and not suspect.is_silent and not cluster.silent()
    cluster.run(10)
    (silent,) = cluster.detector.suspicion()
    assert silent.is_silent


def test_a_host_returns_once() -> None:
    cluster = Cluster("a", "b")
    cluster.run(10)
    del cluster.reporting["b"]
    cluster.run(20)
    cluster.reporting["b"] = ()
    cluster.run(10)
    returned = [body for _, body in cluster.signals if isinstance(body, HostReturned)]
    assert len(returned) == 1 and 20.0 <= returned[0].away_s <= 21.1
    assert len(cluster.silent()) == 1


def test_its_own_lag_does_not_count() -> None:
    cluster = Cluster("a", "b")
    cluster.run(10)
    cluster.now += 30.0  # the sensor's loop stood still; reports wait unread
    cluster.keep(cluster.detector.tick(cluster.now))
    assert not cluster.silent()
    assert cluster.detector.forgiven_s == pytest.approx(29.9, abs=0.2)
    cluster.run(20)
    assert not cluster.silent()


def test_an_irregular_host_gets_a_longer_deadline() -> None:
    detector = FaultDetector(DetectorSettings())
    now, last = 100.0, 100.0
    gaps = [1.0, 1.0, 4.0, 1.0, 1.0, 3.5, 1.0, 1.0, 4.0]
    for gap in gaps * 3:
        while now < last + gap - 1e-9:
            now = round(now + TICK_S, 6)
            assert not detector.tick(now), "an irregular host is not a silent one"
        detector.observe(report("a", now), now)
        last = now


def test_an_expected_host_that_never_reports_is_silent() -> None:
    cluster = Cluster("a")
    cluster.detector.expect("ghost", cluster.now, heard_ago_s=60.0)
    cluster.run(40)
    ((at, body),) = cluster.silent()
    assert body.host_id == "ghost" and 29.0 < at - 100.0 < 31.0


def test_a_host_that_reports_to_another_sensor_is_silent_only_once_it_does_so_no_more() -> None:
    cluster = Cluster("a")
    for _ in range(60):
        cluster.detector.expect("elsewhere", cluster.now, heard_ago_s=0.5)
        cluster.run(1)
    assert not cluster.silent()
    died_at = cluster.now
    for second in range(40):
        cluster.detector.expect("elsewhere", cluster.now, heard_ago_s=0.5 + second)
        cluster.run(1)
    ((at, body),) = cluster.silent()
    assert body.host_id == "elsewhere" and 28.0 < at - died_at < 32.0
    cluster.detector.expect("elsewhere", cluster.now, heard_ago_s=0.5)  # it is back, there
    assert not cluster.detector.suspicion()


def test_memory_is_bounded() -> None:
    settings = DetectorSettings(silence=SilenceSettings(max_hosts=50))
    detector = FaultDetector(settings)
    for number in range(1000):
        now = 100.0 + number * 0.05
        detector.observe(report(f"host-{number}", now, unreachable=("x", f"host-{number + 1}")), now)
    assert len(detector._silence) == 50
    assert len(detector._silence._witnesses) <= 100


def test_a_repeated_report_is_a_sign_of_life_and_nothing_more() -> None:
    detector = FaultDetector(DetectorSettings())
    first = report("a", 100.0, unreachable=("b",))
    assert len(detector.observe(first, 100.0)) == 1
    assert detector.observe(first, 100.1) == []
    older = msgspec.structs.replace(first, sent_at=99.0, engine=EngineStatus(alive=True))
    assert detector.observe(older, 100.2) == []
    assert detector.observe(report("a", 101.0, unreachable=("b",)), 101.0) == []  # still the same episode


# --- stalls ----------------------------------------------------------------------------------------------------------


class Job:
    """One job on two hosts, two ranks each, with beacons that the test moves."""

    def __init__(self) -> None:
        self.detector = FaultDetector(DetectorSettings())
        self.now = 1000.0
        self.generation = 1
        self.step = [-1] * 4
        self.phase = [Phase.STARTING] * 4
        self.moved = [self.now] * 4
        self.done: list[list[tuple[int, float]]] = [[] for _ in range(4)]
        self.stalls: list[RankStalled] = []
        self.lagged_s = 0.0

    def move(self, rank: int, step: int | None = None, phase: Phase = Phase.STEP) -> None:
        self.moved[rank], self.phase[rank] = self.now, phase
        if step is not None:
            self.step[rank] = step
            self.done[rank].append((step, self.now))

    def train(self, steps: int, *, step_s: float = 0.1, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        for _ in range(steps):
            self.now = round(self.now + step_s, 6)
            for rank in ranks:
                self.move(rank, self.step[rank] + 1)
            self.report()

    def wait(self, seconds: float, *, every_s: float = 0.5) -> None:
        for _ in range(round(seconds / every_s)):
            self.now = round(self.now + every_s, 6)
            self.report()

    def report(self, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        for host, on_host in (("a", (0, 1)), ("b", (2, 3))):
            mine = [rank for rank in on_host if rank in ranks]
            statuses = tuple(
                RankStatus("j", self.generation, r, 10 + r, self.phase[r], self.step[r], self.now - self.moved[r])
                for r in mine
            )
            steps = tuple(
                RankSteps("j", self.generation, r, self.done[r][0][0], tuple(t for _, t in self.done[r]))
                for r in mine
                if self.done[r]
            )
            for rank in mine:
                self.done[rank] = []
            found = self.detector.observe(
                report(host, self.now, ranks=statuses, steps=steps, lagged_s=self.lagged_s), self.now
            )
            self.stalls += [body for body in found if isinstance(body, RankStalled)]


@pytest.fixture
def job() -> Job:
    made = Job()
    made.report()
    made.train(30)
    return made


def test_a_stopped_job_is_stalled_once(job: Job) -> None:
    job.wait(20)
    (stall,) = job.stalls
    assert stall.ranks == (0, 1, 2, 3) and stall.step == 29 and stall.phase is Phase.STEP
    assert 2.0 < stall.silent_s < 3.0 and stall.deadline_s == 2.0


def test_the_rank_that_is_furthest_behind_is_named(job: Job) -> None:
    job.now += 0.1
    for rank in (0, 1, 3):
        job.move(rank, 30)
    job.wait(5)
    (stall,) = job.stalls
    assert stall.ranks == (2,) and stall.step == 29


def test_of_equal_steps_the_oldest_beacon_is_named(job: Job) -> None:
    job.now += 0.5
    for rank in (0, 1, 3):
        job.move(rank, phase=Phase.STEP)
    job.wait(5)
    (stall,) = job.stalls
    assert stall.ranks == (2,)


def test_slow_steps_get_a_longer_deadline() -> None:
    job = Job()
    job.report()
    job.train(30, step_s=5.0)
    job.wait(35)
    assert job.stalls == []
    job.wait(20)
    (stall,) = job.stalls
    assert stall.deadline_s == pytest.approx(40.0)


def test_one_rank_in_evaluation_excuses_those_that_wait_for_it(job: Job) -> None:
    job.move(0, phase=Phase.EVAL)
    job.wait(300)
    assert job.stalls == []
    job.train(5)
    job.wait(10)
    assert len(job.stalls) == 1


def test_an_evaluation_does_not_blur_what_a_step_takes(job: Job) -> None:
    for _ in range(10):
        for rank in range(4):
            job.move(rank, phase=Phase.EVAL)
        job.wait(30)
        job.train(10)
    job.wait(5)
    (stall,) = job.stalls
    assert stall.deadline_s == 2.0


def test_parked_and_done_never_stall(job: Job) -> None:
    for rank in range(4):
        job.move(rank, phase=Phase.PARKED if rank else Phase.DONE)
    job.wait(3000, every_s=10.0)
    assert job.stalls == []


def test_a_script_that_never_attaches_never_stalls() -> None:
    job = Job()
    job.wait(10_000, every_s=10.0)
    assert job.stalls == []


def test_the_first_step_may_take_long_and_the_next_start_knows_it(job: Job) -> None:
    fresh = Job()
    fresh.report()
    for rank in range(4):
        fresh.move(rank, phase=Phase.STEP)
    fresh.wait(500)
    assert fresh.stalls == []
    fresh.wait(200)
    assert len(fresh.stalls) == 1
    job.generation, job.step, job.phase = 2, [-1] * 4, [Phase.STEP] * 4
    job.moved = [job.now] * 4
    job.wait(60)
    (stall,) = job.stalls
    assert stall.generation == 2 and stall.deadline_s == 30.0


def test_the_second_step_after_a_restart_may_take_longer_than_a_step_did_before(job: Job) -> None:
    """The machine is busier than it was, and the second iteration rebuilds what the first has measured."""
    job.generation, job.step, job.phase = 2, [-1] * 4, [Phase.STEP] * 4
    job.moved = [job.now] * 4
    job.wait(3)
    job.train(1)
    job.wait(20)
    assert job.stalls == []
    job.wait(10)
    assert [stall.deadline_s for stall in job.stalls] == [pytest.approx(8 * 3.1)]


def test_a_restarted_job_that_is_warm_has_no_more_patience_than_before(job: Job) -> None:
    job.generation, job.step, job.phase = 2, [-1] * 4, [Phase.STEP] * 4
    job.moved = [job.now] * 4
    job.wait(3)
    job.train(5)
    job.wait(3)
    assert [stall.deadline_s for stall in job.stalls] == [2.0]


def test_the_first_step_of_a_script_that_never_restores_is_known_too() -> None:
    job = Job()
    job.wait(3)
    job.train(1)
    job.wait(20)
    assert job.stalls == []


def test_a_lone_rank_far_behind_is_stalled_though_the_others_go_on(job: Job) -> None:
    job.train(40, ranks=(0, 1, 2))
    (stall,) = job.stalls
    assert stall.ranks == (3,) and stall.step == 29


def test_a_new_generation_starts_afresh(job: Job) -> None:
    job.wait(5)
    job.generation = 2
    job.step = [-1] * 4
    job.train(40)
    job.wait(5)
    assert [stall.generation for stall in job.stalls] == [1, 2]
    job.generation = 1
    job.wait(30)
    assert len(job.stalls) == 2  # the past is the past


def test_an_alarm_that_repeats_at_the_same_step_makes_patience_longer(job: Job) -> None:
    for generation, deadline_s in ((1, 2.0), (2, 20.0), (3, 200.0)):
        if generation > 1:
            job.generation, job.step = generation, [-1] * 4
            job.report()
            job.train(30)
        job.wait(300)
        assert job.stalls[-1].generation == generation
        assert job.stalls[-1].deadline_s == pytest.approx(deadline_s)
    job.generation, job.step = 4, [-1] * 4
    job.train(40)
    job.wait(5)
    assert job.stalls[-1].deadline_s == 2.0  # it went past that step: whatever it was is over


def test_recovery_begins_a_new_episode(job: Job) -> None:
    job.wait(5)
    job.train(10)
    job.wait(60)
    assert len(job.stalls) == 2
    assert job.stalls[-1].deadline_s == pytest.approx(8 * 5.1)  # that long a pause is known by now


def test_a_dead_rank_is_not_waited_for(job: Job) -> None:
    for _ in range(10):
        job.now += 0.5
        job.report(ranks=(0, 1, 2))
    (stall,) = job.stalls
    assert 3 not in stall.ranks


def test_a_frozen_host_is_not_a_stalled_job(job: Job) -> None:
    job.now += 30.0  # a virtual machine was paused: the daemon's loop was late, too
    job.lagged_s = 29.9
    job.report()
    assert job.stalls == []
    job.lagged_s = 0.0
    job.wait(1)
    assert job.stalls == []
    job.train(10)
    job.wait(5)
    assert len(job.stalls) == 1
