"""Continuous integration: what is left out or fails twice makes a run red, and what is flaky is written down."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("deploy_ci", ROOT / "deploy" / "ci.py")
assert spec is not None and spec.loader is not None
ci = importlib.util.module_from_spec(spec)
sys.modules["deploy_ci"] = ci  # dataclasses look there
spec.loader.exec_module(ci)

PASSED = ci.Outcome(True)
TODAY = date(2026, 11, 28)


class Machine:
    """Runs targets in no time of ours: each takes so many times its usual time."""

    def __init__(self, slowness: float = 1.0, outcomes: Mapping[tuple[str, bool], object] = {}) -> None:
        self.now_s, self.slowness, self.outcomes = 1_000.0, slowness, outcomes
        self.ran: list[tuple[str, bool]] = []

    def run(self, target: str, again: bool) -> object:
        self.now_s += self.slowness * ci.USUAL_S[target] * (0.1 if again else 1.0)
        self.ran.append((target, again))
        return self.outcomes.get((target, again), PASSED)

    def all(self, limit_s: float = ci.LIMIT_S) -> ci.Report:  # type: ignore[name-defined]
        return ci.run_all(ci.USUAL_S, self.run, lambda: self.now_s, limit_s)


def failed(*names: str, is_whole: bool = True) -> object:
    return ci.Outcome(False, frozenset(names), is_whole)


def test_everything_fits_on_a_machine_that_does_nothing_else() -> None:
    report = Machine().all()
    assert list(report.took_s) == list(ci.USUAL_S) and not report.is_red and not report.left_out


def test_what_is_left_out_makes_the_run_red() -> None:
    report = Machine(slowness=4.0).all()
    assert report.is_red and not report.failed
    assert set(report.took_s) | set(report.left_out) == set(ci.USUAL_S) and "proofs" in report.left_out
    assert not Machine(slowness=4.0).all(limit_s=0).is_red


@pytest.mark.parametrize(
    ("again", "flaky", "is_red"), [(PASSED, ["a::t", "b::t"], False), (failed("b::t"), ["a::t"], True)]
)
def test_a_few_failures_run_again_and_what_passes_then_is_flaky(again: object, flaky: list[str], is_red: bool) -> None:
    machine = Machine(outcomes={("processes", False): failed("a::t", "b::t"), ("processes", True): again})
    report = machine.all()
    assert (report.flaky, report.is_red) == (flaky, is_red)
    assert [target for target, is_again in machine.ran if is_again] == ["processes"]


@pytest.mark.parametrize(
    "outcome", [failed(), failed(*(f"{n}::t" for n in range(ci.MOST_RUN_AGAIN + 1))), failed("a::t", is_whole=False)]
)
def test_nothing_else_runs_again(outcome: object) -> None:
    machine = Machine(outcomes={("test", False): outcome})
    report = machine.all()
    assert report.is_red and ("test", True) not in machine.ran
    assert ("proofs", False) in machine.ran, "the other targets are told of all the same"


@pytest.mark.parametrize(
    ("line", "is_whole"),
    [
        ("FAILED tests/unit/test_a.py::test_b - assert 1 == 2", True),
        ("ERROR tests/unit/test_a.py::test_b - failed on setup", True),
        ("ERROR tests/unit/test_a.py - ImportError", False),
        ("!!!!!! Interrupted: 1 error during collection !!!!!!", False),
        ("INTERNALERROR> Traceback", False),
        ("ERROR    services.main:main.py:12 cannot serve", True),  # a line of a log
        ("TOO DEAR: tests/unit/test_a.py::test_b took 20.0 s, more than ...", False),
        ("E   Read what changed. If it should be so, run `make goldens`.", False),
    ],
)
def test_what_pytest_says_tells_whether_all_tests_began(line: str, is_whole: bool) -> None:
    assert ci.outcome_of(1, [line], ["a::t"]) == ci.Outcome(False, frozenset({"a::t"}), is_whole)


def test_where_pytest_keeps_nothing_its_lines_name_what_failed() -> None:
    """`make test-rdma` runs it in a virtual machine."""
    line = "vm0| FAILED tests/rdma/test_slot_transfers.py::test_a_slot[64 MiB] - flyball.contracts.errors.Unreachable\n"
    failed = frozenset({"tests/rdma/test_slot_transfers.py::test_a_slot[64 MiB]"})
    assert ci.outcome_of(1, ["vm0| 46 passed\n", line]) == ci.Outcome(False, failed)
    assert ci.outcome_of(0, ["vm0| 47 passed\n"]) == PASSED


def test_a_list_of_flaky_tests_is_short_and_young() -> None:
    line = "2026-11-01 | tests/a.py::test_b[x y] | a thread starts late"
    assert ci.too_flaky(["# a comment", "", *[line] * 10], TODAY) == []
    (many,) = ci.too_flaky([line] * 11, TODAY)
    assert "11 lines" in many
    (old,) = ci.too_flaky([line], date(2026, 12, 2))
    assert "flaky for 31 days" in old and "a thread starts late" in old
    for unreadable in ("2026-11-01 tests/a.py::test_b", "2026-13-01 | tests/a.py::test_b | a month too many"):
        assert len(ci.too_flaky([unreadable], TODAY)) == 1


def test_the_kept_list_can_be_read() -> None:
    assert [line for line in ci.too_flaky(ci.KNOWN_FLAKY.read_text().splitlines(), TODAY) if "Not `date" in line] == []


def test_each_target_is_one_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(ci.USUAL_S) <= targets and sum(ci.USUAL_S.values()) < ci.GOAL_S
