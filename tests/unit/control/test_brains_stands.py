"""Several sensors find a hang as one does that sees all ranks: each tells the others of ranks that stand still."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.hosts.reports import report

from flyball.contracts.cluster import Activity, Phase, RankStatus
from flyball.contracts.reports.rank_columns import RankSteps
from flyball.contracts.reports.signals import RankStalled
from flyball.contracts.wire import decode, encode
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector
from services.sensor.detector.shared_stands import MAX_GROUPS, JobStand, StandingRanks, columns_of, stand_of
from services.sensor.detector.watched_ranks import RankEntries, WatchedRanks
from services.sensor.reports.stand_exchange import STALE_S, FreshStands

HOSTS = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
WAITS = (Activity.IDLE, "futex")
SLEEPS = (Activity.IDLE, "nanosleep")
READS = (Activity.BLOCKED, "")
WORKS = (Activity.ACTIVE, "")


class SeveralSensors:
    """A job of six ranks on three hosts; `homes`: host -> the sensor that it reports to."""

    def __init__(self, homes: str) -> None:
        self.homes = dict(zip(HOSTS, homes, strict=True))
        self.sensors = {name: FaultDetector(DetectorSettings()) for name in sorted(set(homes))}
        self.fresh = {name: FreshStands(name) for name in self.sensors}
        self.now = 1000.0
        self.step = 0
        self.moved = 1000.0
        self.doing = {rank: (*WORKS, 1000.0) for ranks in HOSTS.values() for rank in ranks}
        self.told: dict[str, tuple[float, tuple[JobStand, ...]]] = {}
        self.away: set[str] = set()  # sensors that neither tell nor hear
        self.stalls: list[tuple[float, RankStalled]] = []
        for detector in self.sensors.values():
            detector.set_placed({("j", 1): HOSTS})
        self.train(121)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.5
            self.step, self.moved = self.step + 1, self.now
            self.doing = {rank: (*WORKS, self.now) for rank in self.doing}
            self.report(has_stepped=True)
            if self.step % 2 == 0:
                self.exchange()

    def stand(self, doing: tuple[Activity, str], *others: tuple[int, tuple[Activity, str]]) -> None:
        known = dict(others)
        self.doing = {rank: (*known.get(rank, doing), self.now) for rank in self.doing}

    def wait(self, seconds: float, *, every_s: float = 2.5) -> None:
        for _ in range(round(seconds / every_s)):
            self.now += every_s
            self.report()
            self.exchange()

    def report(self, *, has_stepped: bool = False) -> None:
        for host, ranks in HOSTS.items():
            age_s = self.now - self.moved
            statuses = []
            for rank in ranks:
                activity, place, since = self.doing[rank]
                facts = {"activity": activity, "activity_s": self.now - since, "place": place} if age_s > 0.5 else {}
                statuses.append(RankStatus("j", 1, rank, 10 + rank, Phase.STEP, self.step, age_s, **facts))  # type: ignore[arg-type]
            steps = [RankSteps("j", 1, rank, self.step, (self.now,)) for rank in ranks] if has_stepped else []
            sent = report(host, self.now, ranks=statuses, steps=steps)
            self._take(self.sensors[self.homes[host]].observe(sent, self.now))

    def exchange(self) -> None:
        """As the loop does, with the documents as the database has them."""
        for name, detector in self.sensors.items():
            if name in self.away:
                continue
            stands = decode(encode(detector.stands()), tuple[JobStand, ...])
            if stands:
                self.told[name] = (self.now, stands)
            else:
                self.told.pop(name, None)
        for name, detector in self.sensors.items():
            if name not in self.away:
                self._take(detector.hear(self.fresh[name].of(self.told, self.now), self.now))

    def _take(self, signals: Sequence[object]) -> None:
        self.stalls += [(self.now, signal) for signal in signals if isinstance(signal, RankStalled)]


HANGS = {
    "all wait in locks": (WAITS, (), (0, 1, 2, 3, 4, 5)),
    "one sleeps, and the others wait for it": (WAITS, ((4, SLEEPS),), (4,)),
    "one waits for a disk": (WAITS, ((3, READS),), None),
    "all are stopped": ((Activity.STOPPED, ""), (), (0, 1, 2, 3, 4, 5)),
}


@pytest.mark.parametrize("homes", ["xxy", "xyy", "xyz"])
@pytest.mark.parametrize("kind", HANGS)
def test_several_sensors_find_a_hang_as_one_does(kind: str, homes: str) -> None:
    common, others, ranks = HANGS[kind]
    found = []
    for told_to in ("xxx", homes):
        seen = SeveralSensors(told_to)
        seen.stand(common, *others)
        seen.wait(650.0)
        assert len(seen.stalls) == 1, "said once, by one sensor"
        found.append(seen.stalls[0])
    (one_at, one), (many_at, many) = found
    assert (many.ranks, many.stance, many.deadline_s) == (one.ranks, one.stance, one.deadline_s)
    assert one_at <= many_at <= one_at + 5.0
    assert ranks is None or one.ranks == ranks


@pytest.mark.parametrize("homes", ["xyy", "xyz"])
def test_ranks_that_work_elsewhere_are_waited_for_and_what_was_told_is_over(homes: str) -> None:
    seen = SeveralSensors(homes)
    seen.stand(WAITS, (4, WORKS))
    seen.wait(1500.0, every_s=5.0)
    assert not seen.stalls
    seen.train(3)
    seen.stand(WAITS)
    seen.wait(200.0)
    seen.train(5)
    seen.stand(WAITS)
    seen.wait(250.0)
    assert not seen.stalls, "each pause is one of its own"


def test_a_sensor_that_is_away_may_have_ranks_that_work() -> None:
    seen = SeveralSensors("xyy")
    seen.stand(WAITS)
    seen.wait(100.0)
    seen.away = {"y"}
    seen.wait(700.0)
    assert not seen.stalls
    seen.away = set()
    seen.wait(10.0)
    assert len(seen.stalls) == 1


def test_a_host_that_moves_to_another_sensor_keeps_the_hang_in_sight() -> None:
    seen = SeveralSensors("xyy")
    seen.stand(WAITS)
    seen.wait(100.0)
    seen.homes["b"] = "x"
    seen.sensors["y"].leave("b")
    seen.wait(400.0)
    assert [stall.ranks for _, stall in seen.stalls] == [(0, 1, 2, 3, 4, 5)]


def test_healthy_jobs_and_jobs_of_one_sensor_tell_nothing() -> None:
    alone = SeveralSensors("xxx")
    alone.stand(WAITS)
    alone.wait(20.0)
    assert alone.sensors["x"].stands() == () and not alone.sensors["x"].has_ranks_elsewhere
    several = SeveralSensors("xyz")
    assert not several.told and all(sensor.has_ranks_elsewhere for sensor in several.sensors.values())


def test_a_job_of_any_size_is_a_few_groups_of_spans() -> None:
    numbers = tuple(n for n in range(20_000) if n != 777)
    rows = [RankEntries(Phase.STEP, 9, 40.0, 0.0, 0.0, 0, True, 1.0, WAITS) for _ in numbers]
    stand = stand_of("j", 1, [WatchedRanks("h", numbers, rows, 0.0)])
    assert stand is not None and len(encode(stand)) < 300
    assert stand.groups[0].spans == ((0, 776), (778, 19_999)) and stand.groups[0].age_s == 39.0
    seen = columns_of(stand, range(775, 780))
    assert seen is not None and seen.numbers == (775, 776, 778, 779)
    different = [row._replace(step=at) for at, row in enumerate(rows[: MAX_GROUPS + 1])]
    assert stand_of("j", 1, [WatchedRanks("h", numbers[: MAX_GROUPS + 1], different, 0.0)]) is None


def test_entries_count_while_they_advance_whatever_the_clocks_say() -> None:
    stand = JobStand("j", 1, (StandingRanks(((0, 1),), Phase.STEP, 9, *WAITS, True, 40.0, 40.0),))
    fresh = FreshStands("x")
    told = {"x": (5.0, (stand,)), "y": (9_000_000.0, (stand,))}
    assert fresh.of(told, 100.0) == {"y": (stand,)}
    assert fresh.of(told, 100.0 + STALE_S) == {"y": (stand,)}
    assert fresh.of(told, 100.1 + STALE_S) == {}
    assert fresh.of({"y": (9_000_001.0, (stand,))}, 110.0) == {"y": (stand,)}
    assert fresh.of({}, 111.0) == {}
