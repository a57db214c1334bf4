"""Any bad hosts among any number are found by the groups of a check, and no good host is blamed."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.reports.host_checks import CheckMeasure, CheckStage, CheckState
from services.rules import preflight
from services.rules.preflight import HostAnswer, HostFinding

Measure = Callable[[str, int, tuple[str, ...]], CheckMeasure | None]


def run_check(hosts: list[str], helpers: list[str], measure: Measure) -> tuple[dict[str, HostFinding], int]:
    """Run all rounds; return the verdicts and the number of rounds."""
    measures: list[CheckMeasure] = []
    answers: tuple[HostAnswer, ...] = ()
    rounds = 0
    while groups := preflight.next_groups(hosts, helpers, answers):
        rounds += 1
        members = [host for group in groups for host in group]
        assert len(members) == len(set(members)), "a host is in one group at a time"
        for group in groups:
            measures += filter(None, (measure(host, rounds, group) for host in group))
        answers = preflight.answers_of(hosts, measures)
    return preflight.judge(hosts, answers), rounds


def with_bad_links(bad: Collection[str]) -> Measure:
    """Every group with one of these hosts fails, on all its members alike."""

    def measure(host: str, round_: int, group: tuple[str, ...]) -> CheckMeasure:
        if len(group) > 1 and set(group) & set(bad):
            return CheckMeasure(host, round_, group, 1, 0.1, failed=CheckStage.GROUP, message="timed out")
        return CheckMeasure(host, round_, group, 1, 0.1, 0.2)

    return measure


def states(found: dict[str, HostFinding], state: CheckState) -> set[str]:
    return {host for host, finding in found.items() if finding.state is state}


@st.composite
def clusters(draw: st.DrawFn, *, smallest: int, most_bad: int) -> tuple[list[str], set[str]]:
    hosts = [f"host-{number}" for number in range(draw(st.integers(smallest, 24)))]
    return hosts, draw(st.sets(st.sampled_from(hosts), max_size=most_bad))


@given(clusters(smallest=3, most_bad=1))
def test_one_bad_host_is_found_exactly(cluster: tuple[list[str], set[str]]) -> None:
    hosts, bad = cluster
    found, rounds = run_check(hosts, [], with_bad_links(bad))
    assert states(found, CheckState.FAILED) == bad
    assert states(found, CheckState.PASSED) == set(hosts) - bad
    assert rounds <= (1 if not bad else 2 if len(hosts) > 3 else 4)


@given(clusters(smallest=4, most_bad=2))
def test_two_bad_hosts_are_found_exactly(cluster: tuple[list[str], set[str]]) -> None:
    hosts, bad = cluster
    found, _ = run_check(hosts, [], with_bad_links(bad))
    assert states(found, CheckState.FAILED) == bad
    assert states(found, CheckState.PASSED) == set(hosts) - bad


@given(clusters(smallest=1, most_bad=24), st.integers(0, 4))
def test_no_good_host_is_blamed_however_many_are_bad(cluster: tuple[list[str], set[str]], helpers: int) -> None:
    hosts, bad = cluster
    found, rounds = run_check(hosts, [f"spare-{number}" for number in range(helpers)], with_bad_links(bad))
    assert states(found, CheckState.FAILED) <= bad
    assert not states(found, CheckState.PASSED) & bad or len(hosts) == 1
    assert rounds <= preflight.MAX_ROUNDS


@given(clusters(smallest=2, most_bad=24))
def test_a_host_that_fails_by_itself_is_bad_whatever_the_others_do(cluster: tuple[list[str], set[str]]) -> None:
    hosts, bad = cluster

    def measure(host: str, round_: int, group: tuple[str, ...]) -> CheckMeasure | None:
        if host in bad:
            return CheckMeasure(host, round_, group, failed=CheckStage.DEVICE, message="CUDA error")
        stage = CheckStage.GROUP if set(group) & bad else None
        return CheckMeasure(host, round_, group, 1, 0.1, 0.2, failed=stage)

    found, _ = run_check(hosts, [], measure)
    assert states(found, CheckState.FAILED) == bad
    good = set(hosts) - bad
    assert states(found, CheckState.PASSED) == good if len(good) != 1 else not states(found, CheckState.PASSED)


@given(clusters(smallest=4, most_bad=1))
def test_a_host_that_does_not_answer_has_failed(cluster: tuple[list[str], set[str]]) -> None:
    hosts, bad = cluster

    def measure(host: str, round_: int, group: tuple[str, ...]) -> CheckMeasure | None:
        stage = CheckStage.GROUP if set(group) & bad else None
        return None if host in bad else CheckMeasure(host, round_, group, 1, 0.1, 0.2, failed=stage)

    found, rounds = run_check(hosts, [], measure)
    assert states(found, CheckState.FAILED) == bad
    assert states(found, CheckState.PASSED) == set(hosts) - bad
    assert rounds == 1 + len(bad)


@given(st.sampled_from(["a", "b"]))
def test_of_two_hosts_neither_is_blamed(bad: str) -> None:
    found, rounds = run_check(["a", "b"], [], with_bad_links([bad]))
    assert states(found, CheckState.UNKNOWN) == {"a", "b"}
    assert rounds == 1
    assert "one of these two is bad" in found["a"].message


@given(st.sampled_from(["a", "b"]))
def test_a_third_host_shows_which_of_two_is_bad(bad: str) -> None:
    found, _ = run_check(["a", "b"], ["spare"], with_bad_links([bad]))
    assert states(found, CheckState.FAILED) == {bad}
    assert states(found, CheckState.PASSED) == {"a", "b"} - {bad}


@given(st.lists(st.floats(0.9, 1.1), min_size=3, max_size=20), st.floats(2.1, 20.0), st.data())
def test_a_slow_host_is_named_and_no_other(times: list[float], factor: float, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, len(times) - 1))
    times[slow] = factor
    limit_s = preflight.slow_limit_s(times)
    assert [at for at, time_s in enumerate(times) if time_s > limit_s] == [slow]
