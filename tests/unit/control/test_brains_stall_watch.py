"""Which jobs a sensor follows on which hosts, and what it forgets of them."""

from __future__ import annotations

from math import inf

import pytest
from support.hosts.reports import report as made_report

from flyball.contracts.cluster import Phase, RankStatus
from flyball.contracts.reports.rank_columns import RankSteps
from flyball.contracts.reports.signals import RankStalled, Report, SignalBody
from services.sensor.detector import rank_stalls
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.rank_stalls import StallWatch


def report(
    host_id: str, now_s: float, *ranks: tuple[str, int, int, int], age_s: float = 0.0, lagged_s: float = 0.0
) -> Report:
    """Of ranks: (job, generation, rank, step); each completed that step `age_s` ago."""
    statuses = [RankStatus(job, g, rank, 10 + rank, Phase.STEP, step, age_s) for job, g, rank, step in ranks]
    steps = [RankSteps(job, g, rank, step, (now_s - age_s,)) for job, g, rank, step in ranks]
    return made_report(host_id, now_s, ranks=statuses, steps=steps, lagged_s=lagged_s)


def train(watch: StallWatch, *hosts: str, upto: int, generation: int = 1, first_s: float = 100.0) -> float:
    """One rank of job "j" on each host completes a step each second; returns when the last one was."""
    for step in range(upto + 1):
        for rank, host_id in enumerate(hosts):
            assert watch.observe(report(host_id, first_s + step, ("j", generation, rank, step)), first_s + step) == []
    return first_s + upto


@pytest.fixture
def watch() -> StallWatch:
    return StallWatch(StallSettings())


def test_a_host_that_is_forgotten_takes_its_ranks_along_and_leaves_the_others(watch: StallWatch) -> None:
    train(watch, "a", "b", upto=3)
    assert len(watch) == 2
    watch.forget("nobody")
    assert len(watch) == 2
    watch.forget("a")
    assert len(watch) == 1
    assert (watch.stepped_s("a"), watch.stepped_s("b")) == (-inf, 103.0)


def test_a_host_whose_report_names_a_job_no_more_has_none_of_its_ranks(watch: StallWatch) -> None:
    now_s = train(watch, "a", "b", upto=3)
    watch.observe(report("a", now_s + 1, ("other", 1, 0, 5)), now_s + 1)
    assert len(watch) == 2, "one of each job"
    assert (watch.stepped_s("a"), watch.stepped_s("b")) == (now_s + 1, now_s)
    watch.observe(report("a", now_s + 2), now_s + 2)
    assert (len(watch), watch.stepped_s("a")) == (1, -inf)


def test_a_generation_that_left_a_host_says_nothing_of_it(watch: StallWatch) -> None:
    now_s = train(watch, "a", "b", upto=3)
    assert watch.advances("a", now_s) and watch.advances("b", now_s)
    train(watch, "b", "c", upto=3, generation=2, first_s=now_s + 1)
    assert (watch.stepped_s("a"), watch.stepped_s("b")) == (-inf, now_s + 4)
    assert not watch.advances("a", now_s + 4) and watch.advances("c", now_s + 4)
    watch.observe(report("a", now_s + 5, ("j", 1, 0, 9)), now_s + 5)
    assert watch.stepped_s("a") == -inf and len(watch) == 2, "reports of an older generation do not count"


def test_a_job_advances_as_long_as_its_next_step_is_not_long_overdue(watch: StallWatch) -> None:
    now_s = train(watch, "a", upto=20)
    assert watch.advances("a", now_s + 8.0) and not watch.advances("a", now_s + 8.1), "eight times a usual step"


def test_a_host_counts_as_not_seen_from_the_placement_until_it_reports_here_and_again_once_it_is_forgotten(
    watch: StallWatch,
) -> None:
    placed = {("j", 1): {"a": (0,), "b": (1,), "none": ()}, ("j", 2): {"c": (0,)}}

    def unseen() -> set[str]:
        return watch._jobs["j"]._unseen

    watch.set_placed(placed)
    train(watch, "a", upto=0)
    assert unseen() == {"b"}
    watch.observe(report("b", 101.0), 101.0)
    assert unseen() == set(), "it reports here, and its rank has ended"
    watch.forget("none")
    watch.forget("b")
    assert unseen() == {"b"}
    watch.set_placed({("j", 1): {"a": (0,)}})
    assert unseen() == set()
    watch.set_placed(placed)
    train(watch, "a", upto=0, generation=2, first_s=110.0)
    assert unseen() == {"c"}
    watch.set_placed({})
    assert unseen() == set(), "a generation whose placement is unknown is taken to be seen"


def stalled_after_s(watch: StallWatch, now_s: float, upto_s: float) -> float | None:
    """How long a rank that moves no more is waited for; None: longer than `upto_s`."""
    for second in range(1, round(upto_s) + 1):
        found: list[SignalBody] = watch.observe(
            report("a", now_s + second, ("j", 1, 0, 20), age_s=float(second)), now_s + second
        )
        if any(isinstance(body, RankStalled) for body in found):
            return float(second)
    return None


def test_a_jobs_own_timeout_holds_until_it_is_withdrawn() -> None:
    own = {"j": 5.0, "other": 1.0}
    first = StallWatch(StallSettings())
    first.set_hang_timeouts(own)
    assert stalled_after_s(first, train(first, "a", upto=20), 50.0) == 6.0, "it is known before the job"
    later = StallWatch(StallSettings())
    now_s = train(later, "a", upto=20)
    later.set_hang_timeouts(own)
    assert stalled_after_s(later, now_s, 50.0) == 6.0
    withdrawn = StallWatch(StallSettings())
    withdrawn.set_hang_timeouts(own)
    now_s = train(withdrawn, "a", upto=20)
    withdrawn.set_hang_timeouts({"other": 1.0})
    assert stalled_after_s(withdrawn, now_s, 50.0) is None


def test_the_job_that_was_reported_longest_ago_makes_room(watch: StallWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_stalls, "MAX_JOBS", 2)
    for number, job in enumerate(("b", "c", "b", "a")):  # b came first, and was reported again
        watch.observe(report(f"on-{job}", 100.0 + number, (job, 1, 0, 1)), 100.0 + number)
    assert len(watch) == 2
    assert [watch.stepped_s(f"on-{job}") for job in "abc"] == [103.0, 100.0, -inf]


def test_only_jobs_with_steps_are_worth_storing_and_what_was_stored_is_kept_for_them(watch: StallWatch) -> None:
    train(watch, "a", upto=6)
    watch.observe(report("b", 105.0, ("young", 1, 0, 0)), 105.0)
    stored = watch.learned()
    assert set(stored) == {"j"} and stored["j"].pace.steps_seen == 5
    successor = StallWatch(StallSettings())
    successor.observe(report("a", 106.0, ("j", 1, 0, 5)), 106.0)
    successor.recall(stored | {"later": stored["j"]})
    assert successor.learned()["j"].pace.steps_seen == 5, "a job that it knows by now"
    successor.observe(report("b", 106.0, ("later", 1, 0, 5)), 106.0)
    assert successor.learned()["later"].pace.steps_seen == 5, "one of which it had no report yet"


def test_the_time_in_which_nobody_told_of_a_rank_is_no_step_of_it(watch: StallWatch) -> None:
    now_s = train(watch, "a", upto=6)
    watch.forget("a")
    for second in (50, 51, 52):
        watch.observe(report("a", now_s + second, ("j", 1, 0, second - 43)), now_s + second)
    assert set(watch.learned()["j"].pace.steps) == {1.0}


@pytest.mark.parametrize(("lagged_s", "is_forgiven"), [(0.49, False), (0.5, True)])
def test_a_daemon_that_ran_late_has_its_ranks_forgiven(watch: StallWatch, lagged_s: float, is_forgiven: bool) -> None:
    now_s = train(watch, "a", upto=20)
    watch.observe(report("a", now_s + 1, ("j", 1, 0, 20), age_s=1.0, lagged_s=lagged_s), now_s + 1)
    assert watch._jobs["j"].hosts["a"].are_forgiven is is_forgiven
