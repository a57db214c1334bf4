"""When ranks that stand still are called stalled, and when that would be wrong."""

from __future__ import annotations

import msgspec
import pytest
from support.hosts.reports import report as made_report
from support.policy.checked import well_typed

from flyball.contracts.cluster import Activity, Phase, RankStatus
from flyball.contracts.reports.rank_columns import RankSteps
from flyball.contracts.reports.rank_stands import RankStand, Stand
from flyball.contracts.reports.signals import FalseAlarm, RankStalled
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector
from services.sensor.detector.patience import PhasePatience
from services.sensor.detector.stances import Stance
from services.sensor.detector.watched_job import LearnedJob

ALL = (0, 1, 2, 3)
WAITS, DRIVER = "futex", "ioctl"


class Job:
    """One job on two hosts, two ranks each, with beacons that the test moves, and daemons that see what they do."""

    def __init__(self, hang_timeout_s: float = 0.0) -> None:
        self.detector = FaultDetector(DetectorSettings(tick_interval_s=60.0))  # nobody is late here
        if hang_timeout_s:
            self.detector.set_hang_timeouts({"j": hang_timeout_s})
        self.now = 1000.0
        self.generation = 1
        self.step = [-1] * 4
        self.phase = [Phase.STARTING] * 4
        self.moved = [self.now] * 4
        self.doing = [(Activity.UNKNOWN, self.now, "")] * 4
        self.stands: dict[int, RankStand] = {}
        self.done: list[list[tuple[int, float]]] = [[] for _ in range(4)]
        self.stalls: list[RankStalled] = []
        self.false_alarms: list[FalseAlarm] = []
        self.lagged_s = 0.0

    def move(self, rank: int, step: int | None = None, phase: Phase = Phase.STEP) -> None:
        self.moved[rank], self.phase[rank] = self.now, phase
        self.doing[rank] = (Activity.UNKNOWN, self.now, "")
        if step is not None:
            self.step[rank] = step
            self.done[rank].append((step, self.now))

    def do(self, activity: Activity, *ranks: int, place: str = WAITS) -> None:
        """What these ranks, or all, do from now on."""
        for rank in ranks or ALL:
            self.doing[rank] = (activity, self.now, place if activity is Activity.IDLE else "")

    def restart(self) -> None:
        """The next generation, before its first step."""
        self.generation += 1
        self.step, self.phase, self.moved = [-1] * 4, [Phase.STEP] * 4, [self.now] * 4
        self.do(Activity.UNKNOWN)
        self.report()

    def train(self, steps: int, *, step_s: float = 0.1, ranks: tuple[int, ...] = ALL, every: int = 1) -> None:
        for number in range(steps):
            self.now = round(self.now + step_s, 6)
            for rank in ranks:
                self.move(rank, self.step[rank] + 1)
            if number % every == 0 or number == steps - 1:
                self.report()

    def wait(self, seconds: float, *, every_s: float = 0.0) -> None:
        every_s = every_s or (0.5 if seconds <= 100.0 else 5.0)
        for _ in range(round(seconds / every_s)):
            self.now = round(self.now + every_s, 6)
            self.report()

    def pause(self, seconds: float, activity: Activity = Activity.IDLE, place: str = DRIVER, *ranks: int) -> None:
        """All, or these ranks, do so for a while; the others wait for them."""
        self.do(Activity.IDLE)
        self.do(activity, *ranks, place=place)
        self.wait(seconds)

    def report(self, ranks: tuple[int, ...] = ALL) -> None:
        for host, on_host in (("a", (0, 1)), ("b", (2, 3))):
            mine = [rank for rank in on_host if rank in ranks]
            statuses = [self._status(rank) for rank in mine]
            steps = tuple(
                RankSteps("j", self.generation, r, self.done[r][0][0], tuple(t for _, t in self.done[r]))
                for r in mine
                if self.done[r]
            )
            for rank in mine:
                self.done[rank] = []
            sent = made_report(host, self.now, ranks=statuses, steps=steps, lagged_s=self.lagged_s)
            for body in self.detector.observe(sent, self.now):
                assert isinstance(body, RankStalled | FalseAlarm)
                well_typed(body)
                (self.stalls if isinstance(body, RankStalled) else self.false_alarms).append(body)  # type: ignore[attr-defined]

    def _status(self, rank: int) -> RankStatus:
        age_s = self.now - self.moved[rank]
        activity, since, place = self.doing[rank] if age_s > 0.5 else (Activity.UNKNOWN, self.now, "")
        phase, step = self.phase[rank], self.step[rank]
        seen = (activity, self.now - since, place, self.stands.get(rank) if age_s > 1.0 else None)
        return RankStatus("j", self.generation, rank, 10 + rank, phase, step, age_s, *seen)


@pytest.fixture
def job() -> Job:
    """It has trained for a hundred seconds."""
    made = Job()
    made.report()
    made.train(1000, every=10)
    return made


# --- ordinary work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activity", [Activity.ACTIVE, Activity.IDLE, Activity.UNKNOWN, Activity.BLOCKED])
def test_an_evaluation_of_eight_seconds_every_three_hundred_steps_is_no_stall(activity: Activity) -> None:
    """The README's own snippet, whatever the evaluation does."""
    job = Job()
    job.report()
    for _ in range(6):
        job.train(300, step_s=0.05, every=20)
        job.pause(8.0, activity)
    assert job.stalls == []


@pytest.mark.parametrize(("activity", "seconds"), [(Activity.ACTIVE, 1500.0), (Activity.IDLE, 25.0)])
def test_rank_0_may_evaluate_alone_while_the_others_wait(job: Job, activity: Activity, seconds: float) -> None:
    for _ in range(3):
        job.train(200, every=10)
        job.pause(seconds, activity, DRIVER, 0)
    assert job.stalls == []


def test_a_pause_of_all_is_longer_than_that_of_one(job: Job) -> None:
    job.pause(290.0)
    assert job.stalls == []
    job.train(10)
    job.pause(60.0, Activity.IDLE, DRIVER, 0)
    assert [stall.ranks for stall in job.stalls] == [(0,)]


def test_rare_pauses_are_learnt_for_the_whole_life_of_a_job(job: Job) -> None:
    """A generation does not forget, nor do a thousand steps."""
    job.pause(250.0)
    job.train(5)
    job.restart()
    job.train(2000, every=10)
    job.pause(900.0)
    assert job.stalls == []
    job.train(10)
    job.pause(4000.0)
    assert [stall.deadline_s for stall in job.stalls] == [pytest.approx(4 * 900.0, rel=0.01)]


def test_a_pause_in_which_ranks_worked_says_nothing_of_ranks_that_stand(job: Job) -> None:
    job.pause(900.0, Activity.ACTIVE)
    job.train(10)
    job.pause(40.0, Activity.IDLE, DRIVER, 2)
    assert [stall.deadline_s for stall in job.stalls] == [30.0]


def test_little_is_said_before_enough_was_seen() -> None:
    job = Job()
    job.report()
    job.train(40)
    job.pause(50.0, Activity.IDLE, DRIVER, 1)
    assert job.stalls == []
    job.wait(20.0)
    assert [stall.deadline_s for stall in job.stalls] == [60.0]


@pytest.mark.parametrize("activity", [Activity.TRACED, Activity.READS_INPUT])
def test_somebody_at_a_debugger_or_a_prompt_is_waited_for(job: Job, activity: Activity) -> None:
    job.do(Activity.IDLE)
    job.do(activity, 1)
    job.wait(20_000.0, every_s=10.0)
    assert job.stalls == []


@pytest.mark.parametrize(
    ("activity", "ranks", "waited_s", "stance"),
    [
        (Activity.STOPPED, ALL, 60.0, "suspended"),
        (Activity.IDLE, ALL, 300.0, "together"),
        (Activity.BLOCKED, (0,), 600.0, "blocked"),  # by a disk
        (Activity.ACTIVE, (3,), 1800.0, "working"),
        (Activity.UNKNOWN, (3,), 1800.0, "working"),
    ],
)
def test_how_long_is_waited_depends_on_what_the_ranks_do_and_is_told_once(
    job: Job, activity: Activity, ranks: tuple[int, ...], waited_s: float, stance: str
) -> None:
    job.pause(waited_s - 5.0, activity, WAITS if ranks == ALL else "", *ranks)
    assert job.stalls == []
    job.wait(100.0)
    (stall,) = job.stalls
    assert (stall.ranks, stall.stance, stall.deadline_s, stall.step) == (ranks, stance, waited_s, 999)
    assert stall.silent_s < waited_s + 5.0


@pytest.mark.parametrize(
    ("elsewhere", "waited_s"),
    [
        ({}, 300.0),
        ({"c": (4,)}, 1800.0),  # this one may work
        ({"c": ()}, 300.0),
        ({"a": (0, 1), "b": (2, 3)}, 300.0),
    ],
)
def test_who_waits_for_ranks_that_report_to_another_sensor_has_half_an_hour(
    job: Job, elsewhere: dict[str, tuple[int, ...]], waited_s: float
) -> None:
    job.detector.set_placed({("j", 1): {"a": (0, 1), "b": (2, 3)} | elsewhere, ("j", 2): {"d": (0,)}})
    job.do(Activity.IDLE)
    job.wait(waited_s - 10.0)
    assert job.stalls == []
    job.wait(20.0)
    (stall,) = job.stalls
    assert (stall.ranks, stall.deadline_s) == (ALL, waited_s)


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_frozen_process_is_found_in_two_seconds(job: Job) -> None:
    job.pause(10.0, Activity.STOPPED, "", 2)
    (stall,) = job.stalls
    assert stall.ranks == (2,) and stall.step == 999 and stall.phase is Phase.STEP
    assert 2.0 < stall.silent_s < 3.0 and stall.deadline_s == 2.0
    assert stall.stance == "frozen" and stall.seen.startswith("stopped by a signal")
    assert stall.limit == "the deadline of a stopped process while others run"


@pytest.mark.parametrize(("step_s", "deadline_s"), [(0.9, 2.0), (3.0, 6.0), (60.0, 10.0)])
def test_a_frozen_process_of_a_job_with_slow_steps_is_found_in_ten_seconds(step_s: float, deadline_s: float) -> None:
    job = Job()
    job.report()
    job.train(30, step_s=step_s)
    job.pause(15.0, Activity.STOPPED, "", 2)
    assert [stall.deadline_s for stall in job.stalls] == [pytest.approx(deadline_s)]


def test_a_frozen_process_is_found_as_soon_in_a_young_job_and_after_a_slow_step() -> None:
    job = Job()
    job.report()
    job.train(30)
    job.pause(20.0, Activity.ACTIVE)
    job.train(30)
    job.pause(10.0, Activity.STOPPED, "", 0)
    assert [stall.ranks for stall in job.stalls] == [(0,)] and job.stalls[0].silent_s < 3.0


def test_a_process_that_is_stopped_for_a_moment_in_a_long_evaluation_is_not_frozen(job: Job) -> None:
    job.pause(100.0, Activity.ACTIVE)
    job.do(Activity.STOPPED, 0)  # somebody takes a look at it
    job.wait(0.5)
    job.do(Activity.ACTIVE, 0)
    job.wait(100.0)
    assert job.stalls == []


def test_one_rank_that_stands_while_others_wait_is_found_in_half_a_minute(job: Job) -> None:
    job.pause(60.0, Activity.IDLE, DRIVER, 1)
    (stall,) = job.stalls
    assert stall.ranks == (1,) and 30.0 < stall.silent_s < 32.0 and stall.stance == "stands"
    assert stall.seen == f"idle in {DRIVER}, while the others wait in {WAITS}"


def test_of_two_halves_that_both_wait_neither_is_blamed(job: Job) -> None:
    job.pause(100.0, Activity.IDLE, "poll", 0, 1)
    assert job.stalls == []
    job.wait(250.0)
    assert [stall.ranks for stall in job.stalls] == [ALL]


def test_ranks_that_sleep_longer_than_one_that_waits_for_them_are_not_blamed_on_it(job: Job) -> None:
    job.pause(100.0, Activity.IDLE, DRIVER, 0, 1, 2)
    assert job.stalls == []


def test_the_rank_that_is_furthest_behind_is_named(job: Job) -> None:
    job.now += 0.1
    for rank in (0, 1, 3):
        job.move(rank, 1000)
    job.pause(400.0, Activity.IDLE, WAITS)
    (stall,) = job.stalls
    assert stall.ranks == (2,) and stall.step == 999


def test_slow_steps_get_a_longer_deadline() -> None:
    job = Job()
    job.report()
    job.train(130, step_s=10.0)
    job.pause(75.0, Activity.IDLE, DRIVER, 0)
    assert job.stalls == []
    job.wait(10.0)
    (stall,) = job.stalls
    assert stall.deadline_s == pytest.approx(80.0) and stall.limit == "8 x the usual step of 10.00 s"


def test_one_slow_step_in_ten_changes_nothing(job: Job) -> None:
    for _ in range(10):
        job.train(19)
        job.train(1, step_s=20.0)
    job.pause(40.0, Activity.IDLE, DRIVER, 0)
    assert [stall.deadline_s for stall in job.stalls] == [30.0]


# --- phases ----------------------------------------------------------------------------------------------------------


def test_one_rank_in_evaluation_excuses_those_that_wait_for_it(job: Job) -> None:
    job.move(0, phase=Phase.EVAL)
    job.pause(1000.0)
    assert job.stalls == []
    job.train(5)
    job.pause(400.0 + 5 * 1000.0)
    assert len(job.stalls) == 1


def test_parked_and_done_never_stall(job: Job) -> None:
    for rank in ALL:
        job.move(rank, phase=Phase.PARKED if rank else Phase.DONE)
    job.do(Activity.IDLE)
    job.wait(10_000)
    assert job.stalls == []


def test_ranks_that_are_done_do_not_hide_one_that_stands(job: Job) -> None:
    for rank in (0, 1):
        job.move(rank, phase=Phase.DONE)
    job.pause(400.0)
    assert [stall.ranks for stall in job.stalls] == [(2, 3)]


def test_the_first_step_may_take_long() -> None:
    job = Job()
    job.report()
    for rank in ALL:
        job.move(rank, phase=Phase.STEP)
    job.pause(590.0)
    assert job.stalls == []
    job.wait(20.0)
    assert [stall.deadline_s for stall in job.stalls] == [600.0]


def test_how_long_a_start_took_says_nothing_of_a_rank_that_stands_later() -> None:
    """One rank downloads the model while the others wait for it, before their first step."""
    job = Job()
    job.report()
    job.pause(100.0, Activity.IDLE, DRIVER, 0)
    for rank in ALL:
        job.move(rank, phase=Phase.STEP)
    job.pause(200.0, Activity.IDLE, DRIVER, 0)
    job.train(1000, every=10)
    job.restart()
    job.pause(100.0, Activity.ACTIVE, "", 2)
    job.train(1000, every=10)
    assert job.stalls == []
    job.pause(60.0, Activity.IDLE, DRIVER, 1)
    assert [stall.deadline_s for stall in job.stalls] == [30.0]


# --- scripts that do not attach --------------------------------------------------------------------------------------


def test_a_script_that_never_attaches_stalls_if_all_its_ranks_do_nothing_for_half_an_hour() -> None:
    job = Job()
    job.pause(1790.0)
    assert job.stalls == []
    job.wait(20.0)
    assert [(stall.ranks, stall.stance) for stall in job.stalls] == [(ALL, "together")]


def test_a_script_that_never_attaches_is_not_judged_while_one_of_its_ranks_works() -> None:
    job = Job()
    job.pause(10_000.0, Activity.ACTIVE, "", 1)
    assert job.stalls == []


def test_a_frozen_rank_of_a_script_that_never_attaches_is_found() -> None:
    job = Job()
    job.wait(100.0)
    job.pause(12.0, Activity.STOPPED, "", 1)
    assert [(stall.ranks, stall.stance) for stall in job.stalls] == [((1,), "frozen")]


# --- an explicit bound -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activity", [Activity.ACTIVE, Activity.IDLE, Activity.UNKNOWN, Activity.BLOCKED])
def test_an_explicit_bound_holds_whatever_the_ranks_do(activity: Activity) -> None:
    job = Job(hang_timeout_s=20.0)
    job.report()
    job.train(30)
    job.pause(19.0, activity)
    assert job.stalls == []
    job.wait(3.0)
    assert [(stall.deadline_s, stall.limit) for stall in job.stalls] == [(20.0, "--hang-timeout")]


def test_an_explicit_bound_holds_in_a_phase_and_leaves_frozen_processes_their_own(job: Job) -> None:
    job.detector.set_hang_timeouts({"j": 4000.0})
    for rank in ALL:
        job.move(rank, phase=Phase.EVAL)
    job.pause(3990.0, Activity.ACTIVE)
    assert job.stalls == []
    job.wait(20.0)
    assert len(job.stalls) == 1
    job.train(5)
    job.pause(5.0, Activity.STOPPED, "", 0)
    assert job.stalls[1].stance == "frozen" and job.stalls[1].silent_s < 3.0


def test_an_explicit_bound_is_how_long_a_script_that_never_attaches_may_be_idle() -> None:
    job = Job(hang_timeout_s=60.0)
    job.pause(1000.0, Activity.ACTIVE, "", 0)
    assert job.stalls == []
    job.pause(70.0)
    assert [(stall.deadline_s, stall.stance) for stall in job.stalls] == [(60.0, "together")]


# --- false alarms ----------------------------------------------------------------------------------------------------


def test_a_false_alarm_is_said_and_doubles_the_patience(job: Job) -> None:
    job.pause(310.0)
    (alarm,) = job.stalls
    job.restart()
    job.train(1000, every=10)
    job.pause(320.0)  # the same evaluation, which nobody announces
    assert job.stalls == [alarm]
    job.train(1)
    (said,) = job.false_alarms
    assert said.generation == 2 and said.stalled_generation == 1 and said.step == 999 and said.ranks == ALL
    assert said.paused_s == pytest.approx(320.0, abs=2.0) and said.patience == 2.0
    job.train(50)
    job.pause(3000.0)
    assert job.stalls[1].deadline_s == pytest.approx(2 * 4 * 320.0, rel=0.02)
    assert "after false alarms" in job.stalls[1].limit


def test_a_pause_before_the_first_step_shows_a_false_alarm_too(job: Job) -> None:
    """What was in memory is restored, so the pause comes first."""
    job.restart()
    job.train(3)
    job.pause(310.0)
    step = job.step[0]
    job.restart()
    job.pause(320.0)
    for rank in ALL:
        job.step[rank] = step
    job.train(3)
    assert [said.step for said in job.false_alarms] == [step]


def test_a_restart_that_passes_the_place_at_once_shows_nothing(job: Job) -> None:
    job.pause(310.0)
    job.restart()
    job.train(1200, every=10)
    job.pause(310.0)
    assert job.false_alarms == [] and [stall.deadline_s for stall in job.stalls] == [300.0] * 2


def test_a_stopped_process_is_never_a_false_alarm(job: Job) -> None:
    job.pause(5.0, Activity.STOPPED, "", 0)
    job.restart()
    job.train(1000, every=10)
    job.pause(5.0, Activity.ACTIVE)
    job.train(20)
    assert len(job.stalls) == 1 and job.false_alarms == []


def test_an_alarm_that_repeats_at_the_same_step_makes_patience_longer(job: Job) -> None:
    for generation, deadline_s in ((1, 30.0), (2, 300.0), (3, 3000.0)):
        if generation > 1:
            job.restart()
            job.train(1000, every=10)
        job.pause(3500.0, Activity.IDLE, DRIVER, 0)
        assert [stall.generation for stall in job.stalls] == [*range(1, generation + 1)]
        assert job.stalls[-1].deadline_s == pytest.approx(deadline_s)


# --- where they stand -------------------------------------------------------------------------------------------------


def explained(job: Job, **of_rank_0: str) -> None:
    """Rank 0 stands in its script, and the others wait for it."""
    job.do(Activity.IDLE)
    job.stands = {rank: RankStand(rank, Stand.COLLECTIVE, "all_reduce") for rank in (1, 2, 3)}
    job.stands[0] = RankStand(0, of_rank_0.pop("kind", Stand.LOCK), caller="wait (train.py:7)", **of_rank_0)


@pytest.mark.parametrize(("steps", "step_s", "deadline_s"), [(20, 0.1, 5.0), (1000, 0.1, 5.0), (100, 2.0, 40.0)])
def test_a_rank_that_nothing_can_wake_is_acted_on_in_seconds(steps: int, step_s: float, deadline_s: float) -> None:
    job = Job()
    job.report()
    job.train(steps, step_s=step_s)
    explained(job, proof="nobody can release its lock")
    job.wait(60.0)
    (stall,) = job.stalls
    assert (stall.ranks, stall.stance, stall.deadline_s) == ((0,), "dead", pytest.approx(deadline_s))
    assert stall.silent_s <= deadline_s + 0.5 and "nobody can release its lock" in stall.seen


def test_ranks_that_wait_for_nothing_outside_have_half_a_minute_also_in_a_new_job() -> None:
    job = Job()
    job.report()
    job.train(20)
    explained(job)
    job.wait(60.0)
    assert [(stall.ranks, stall.stance, stall.deadline_s) for stall in job.stalls] == [(ALL, "stuck", 30.0)]


@pytest.mark.parametrize(("kind", "awaits"), [(Stand.NETWORK, ""), (Stand.SLEEP, ""), (Stand.LOCK, "recvfrom")])
def test_a_rank_that_waits_for_something_outside_has_five_minutes(job: Job, kind: Stand, awaits: str) -> None:
    explained(job, kind=kind, awaits=awaits)
    job.wait(295.0)
    assert job.stalls == []
    job.wait(10.0)
    assert [(stall.ranks, stall.stance) for stall in job.stalls] == [((0,), "world")]


def test_what_was_a_wait_for_something_outside_until_now_has_half_a_minute_from_now_on(job: Job) -> None:
    explained(job, awaits="recvfrom")
    job.wait(100.0)
    job.stands[0] = RankStand(0, Stand.LOCK, caller="wait (train.py:7)")
    job.wait(28.0)
    assert job.stalls == []
    job.wait(5.0)
    assert [stall.stance for stall in job.stalls] == ["stuck"]


def test_an_alarm_at_a_place_makes_patience_there_longer_at_whatever_step(job: Job) -> None:
    for steps, deadline_s in ((1500, 30.0), (1600, 300.0), (1700, 3000.0), (1800, 3000.0)):
        explained(job)
        job.wait(3500.0, every_s=5.0)
        assert job.stalls[-1].deadline_s == pytest.approx(deadline_s)
        job.stands = {}
        job.restart()
        job.train(steps, every=10)
    explained(job)
    job.stands[0] = RankStand(0, Stand.LOCK, caller="elsewhere (train.py:9)")
    job.wait(40.0)
    assert job.stalls[-1].deadline_s == pytest.approx(30.0), "it is another place"


# --- episodes --------------------------------------------------------------------------------------------------------


def test_a_lone_rank_far_behind_is_stalled_though_the_others_go_on(job: Job) -> None:
    job.do(Activity.ACTIVE, 3)
    job.train(19_000, ranks=(0, 1, 2), every=10)
    (stall,) = job.stalls
    assert stall.ranks == (3,) and stall.step == 999


def test_a_new_generation_starts_afresh(job: Job) -> None:
    job.pause(5.0, Activity.STOPPED, "", 0)
    job.restart()
    job.train(1010, every=10)
    job.pause(5.0, Activity.STOPPED, "", 0)
    assert [stall.generation for stall in job.stalls] == [1, 2]
    job.generation = 1
    job.wait(4000)
    assert len(job.stalls) == 2  # the past is the past


def test_recovery_begins_a_new_episode(job: Job) -> None:
    for _ in range(2):
        job.pause(5.0, Activity.STOPPED, "", 0)
        job.train(10)
    assert len(job.stalls) == 2


def test_a_dead_rank_is_not_waited_for(job: Job) -> None:
    job.do(Activity.IDLE)
    for _ in range(700):
        job.now += 0.5
        job.report(ranks=(0, 1, 2))
    (stall,) = job.stalls
    assert 3 not in stall.ranks


def test_a_frozen_host_is_not_a_stalled_job(job: Job) -> None:
    job.now += 4000.0  # a virtual machine was paused: the daemon's loop was late, too
    job.lagged_s = 3999.9
    job.report()
    assert job.stalls == []
    job.lagged_s = 0.0
    job.wait(1)
    assert job.stalls == []
    job.train(10)
    job.pause(5.0, Activity.STOPPED, "", 0)
    assert len(job.stalls) == 1


def test_a_setting_that_names_one_stance_or_phase_leaves_the_others() -> None:
    given = b'{"stalls": {"stances": {"together": 600}, "phases": {"2": {"unknown_s": 1, "floor_s": 2, "factor": 3}}}}'
    changed = msgspec.json.decode(given, type=DetectorSettings, strict=False).stalls
    usual = DetectorSettings().stalls
    assert changed.stances == {**usual.stances, Stance.TOGETHER: 600.0}
    assert changed.phases == {**usual.phases, Phase(2): PhasePatience(1.0, 2.0, 3.0)}


def restarted(job: Job) -> None:
    """Another sensor, which has what this one stored."""
    stored = msgspec.json.decode(msgspec.json.encode(job.detector.learned()), type=dict[str, LearnedJob])
    job.detector = FaultDetector(DetectorSettings(tick_interval_s=60.0))
    job.report()
    job.detector.recall(stored)


def test_a_hang_in_progress_is_found_by_a_restarted_sensor_as_it_would_have_been(job: Job) -> None:
    job.pause(10.0, Activity.IDLE, DRIVER, 2)
    restarted(job)
    job.wait(40.0)
    assert [(stall.ranks, stall.deadline_s) for stall in job.stalls] == [((2,), 30.0)]


def test_a_restarted_sensor_knows_the_pauses_that_a_job_went_on_from(job: Job) -> None:
    job.pause(250.0)
    job.train(10)
    restarted(job)
    job.train(10)
    job.pause(900.0)
    assert job.stalls == []
    job.wait(200.0)
    assert [stall.deadline_s for stall in job.stalls] == [pytest.approx(4 * 250.0, rel=0.03)]


def test_a_restarted_sensor_takes_an_alarm_back_that_was_false(job: Job) -> None:
    job.pause(310.0)
    assert len(job.stalls) == 1
    restarted(job)
    job.restart()
    job.train(1)
    assert job.detector.learned()["j"].pace.repeats == 1


def test_a_generation_without_a_step_is_stored_as_one(job: Job) -> None:
    assert job.detector.learned()["j"].stepped_to == 999
    job.restart()
    job.wait(1.0)
    assert (job.detector.learned()["j"].generation, job.detector.learned()["j"].stepped_to) == (2, -1)


def test_what_a_sensor_learned_itself_counts_more_than_what_was_stored(job: Job) -> None:
    stored = job.detector.learned()
    job.pause(280.0)
    job.train(5)
    before = job.detector.learned()
    job.detector.recall(stored)
    assert job.detector.learned() == before


def test_what_was_stored_of_a_job_outlives_news_of_other_jobs(job: Job) -> None:
    stored = job.detector.learned()
    job.detector = FaultDetector(DetectorSettings(tick_interval_s=60.0))
    job.detector.recall(stored)
    job.detector.recall({})
    job.report()
    assert job.detector.learned()["j"].pace.steps == stored["j"].pace.steps


def test_a_job_that_restarts_with_its_sensor_warms_up_anew(job: Job) -> None:
    stored = job.detector.learned()
    job.detector = FaultDetector(DetectorSettings(tick_interval_s=60.0))
    job.detector.recall(stored)
    job.restart()
    job.train(1, step_s=60.0)
    job.pause(470.0, Activity.IDLE, DRIVER, 0)
    assert job.stalls == [], "its second step may take eight times as long as the first"
    job.wait(20.0)
    assert [stall.deadline_s for stall in job.stalls] == [480.0]


def test_an_alarm_that_was_recalled_ends_when_its_rank_goes_on(job: Job) -> None:
    job.pause(310.0)
    assert len(job.stalls) == 1
    restarted(job)
    assert job.detector.learned()["j"].alarm is not None
    job.train(1)
    assert job.detector.learned()["j"].alarm is None


def test_a_process_that_was_stopped_before_it_was_seen_to_be_has_its_time_from_then_on(job: Job) -> None:
    job.do(Activity.ACTIVE)
    job.wait(30.0)
    job.do(Activity.IDLE, 1, 2, 3)
    job.doing[0] = (Activity.STOPPED, job.now - 25.0, "")
    job.wait(1.5)
    assert not job.stalls, "the time since it was seen counts twice"
    job.wait(0.5)
    (stall,) = job.stalls
    assert (stall.ranks, stall.stance, stall.silent_s) == ((0,), "frozen", 32.0)
    assert (stall.deadline_s, stall.step, stall.generation, stall.job) == (2.0, 999, 1, "j")


def test_ranks_without_a_known_activity_have_stood_for_as_long_as_their_beacons(job: Job) -> None:
    job.wait(1799.0)
    assert not job.stalls
    job.wait(10.0)
    assert job.stalls and job.stalls[0].stance == "working"
