"""Whatever ordinary pauses a job makes, it is not called stalled; and a rank that is frozen or stands always is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.cluster import Activity, HostFacts, Phase, RankStatus
from flyball.contracts.reports.rank_columns import RankSteps, in_columns, steps_together
from flyball.contracts.reports.signals import EngineStatus, RankStalled, Report, SignalBody
from flyball.contracts.wire import WIRE_VERSION
from services.sensor.detector.job_pace import FROZEN_MAX_S
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.rank_stalls import StallWatch

RANKS = 4
SETTINGS = StallSettings()
LEAST_S = {kind.value: least_s for kind, least_s in SETTINGS.stances.items()}


class Job:
    """Ranks 0 to 3 on one host; what each does while no step is made: an activity, and where."""

    def __init__(self, step_s: float) -> None:
        self.watch = StallWatch(SETTINGS)
        self.now_s, self.step_s, self.step, self.generation = 100.0, step_s, -1, 1
        self.moved_s = self.now_s
        self.found: list[SignalBody] = []

    def train(self, steps: int) -> None:
        while steps:
            some = min(steps, 40)
            times = tuple(self.now_s + (number + 1) * self.step_s for number in range(some))
            runs = [RankSteps("j", self.generation, rank, self.step + 1, times) for rank in range(RANKS)]
            steps, self.step, self.now_s = steps - some, self.step + some, times[-1]
            self.moved_s = self.now_s
            self.report([(Activity.UNKNOWN, "")] * RANKS, runs)

    def pause(self, doing: list[tuple[Activity, str]], seconds: float) -> None:
        began_s = self.now_s
        for number in range(1, 26):
            self.now_s = began_s + seconds * number / 25
            self.report(doing)

    def report(self, doing: list[tuple[Activity, str]], runs: list[RankSteps] | None = None) -> None:
        age_s = self.now_s - self.moved_s
        workers, progress = in_columns(
            RankStatus("j", self.generation, rank, 1, Phase.STEP, self.step, age_s, activity, age_s, place)
            for rank, (activity, place) in enumerate(doing)
        )
        report = Report(
            version=WIRE_VERSION,
            incarnation="i",
            sent_at=self.now_s,
            interval_s=1.0,
            facts=HostFacts("h", "ip", "rack", "ip:1", 1, "1", 1),
            engine=EngineStatus(alive=True),
            workers=workers,
            progress=progress,
            completed=steps_together(runs or ()),
        )
        self.found += self.watch.observe(report, self.now_s)


WAITS, SLEEPS = (Activity.IDLE, "futex"), (Activity.IDLE, "clock_nanosleep")
# What ranks do, and for how long at least nobody says a word.
ORDINARY = {
    "all evaluate": ([(Activity.ACTIVE, "")] * RANKS, LEAST_S["working"]),
    "rank 0 evaluates": ([(Activity.ACTIVE, ""), WAITS, WAITS, WAITS], LEAST_S["working"]),
    "they cannot be seen": ([(Activity.UNKNOWN, "")] * RANKS, LEAST_S["working"]),
    "all sleep": ([SLEEPS] * RANKS, LEAST_S["together"]),
    "most sleep": ([SLEEPS, SLEEPS, SLEEPS, WAITS], LEAST_S["together"]),
    "rank 0 saves": ([(Activity.BLOCKED, ""), WAITS, WAITS, WAITS], LEAST_S["blocked"]),
    "rank 0 sleeps": ([SLEEPS, WAITS, WAITS, WAITS], LEAST_S["world"]),
    "somebody debugs": ([(Activity.TRACED, ""), WAITS, WAITS, WAITS], 1e6),
    "somebody types": ([(Activity.READS_INPUT, ""), WAITS, WAITS, WAITS], 1e6),
    "all are suspended": ([(Activity.STOPPED, "")] * RANKS, LEAST_S["suspended"]),
}
pauses = st.lists(st.tuples(st.integers(1, 400), st.sampled_from(sorted(ORDINARY)), st.floats(0.01, 0.99)), max_size=6)


def lived(step_s: float, history: list[tuple[int, str, float]]) -> Job:
    """A job that made these pauses, each some steps after the one before, for a part of the time that it may."""
    job = Job(step_s)
    job.train(3)
    for steps, kind, part in history:
        doing, least_s = ORDINARY[kind]
        job.train(steps)
        job.pause(doing, part * least_s)
    job.train(10)
    return job


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 5.0), pauses)
def test_no_sequence_of_ordinary_pauses_is_a_stall(step_s: float, history: list[tuple[int, str, float]]) -> None:
    assert lived(step_s, history).found == []


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 5.0), pauses, st.sets(st.integers(0, RANKS - 1), min_size=1, max_size=RANKS - 1))
def test_frozen_ranks_are_found_in_ten_seconds_whatever_was_before(
    step_s: float, history: list[tuple[int, str, float]], frozen: set[int]
) -> None:
    job = lived(step_s, history)
    job.pause([(Activity.STOPPED, "") if rank in frozen else WAITS for rank in range(RANKS)], 11.0)
    (stall,) = job.found
    assert isinstance(stall, RankStalled) and stall.stance == "frozen"
    assert set(stall.ranks) == frozen and stall.deadline_s <= FROZEN_MAX_S


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 5.0), pauses, st.sampled_from(["all sleep", "rank 0 sleeps", "rank 0 saves", "all evaluate"]))
def test_what_goes_on_without_end_is_a_stall_in_four_times_the_longest_pause(
    step_s: float, history: list[tuple[int, str, float]], kind: str
) -> None:
    job = lived(step_s, history)
    doing, least_s = ORDINARY[kind]
    longest_s = max((part * ORDINARY[name][1] for _, name, part in history if ORDINARY[name][1] < 1e6), default=0.0)
    job.pause(doing, 1.1 * max(least_s, SETTINGS.unsettled_s, 4.0 * longest_s, 8.0 * step_s))
    (stall,) = job.found
    assert isinstance(stall, RankStalled)
    assert stall.ranks == ((0,) if kind.startswith("rank 0") else (0, 1, 2, 3))
