"""What tests cost in processor time: measured for each; the dearest are shown; a test of the first ring has a limit."""

from __future__ import annotations

import os
import resource
import tomllib
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from support import rings

BUDGETS = Path(__file__).parents[1] / "architecture" / "budgets.toml"
SHOWN = 30
_COST = "processor_s"
_IS_FIRST = "first_ring"


def begin(item: pytest.Item) -> None:
    item.stash[_BEGAN] = processor_s(of_children=not rings.is_first(item))


def end(item: pytest.Item) -> None:
    """Goes with the report of the test's teardown, from whatever worker it ran in."""
    is_first = rings.is_first(item)
    item.user_properties += properties(processor_s(of_children=not is_first) - item.stash[_BEGAN], is_first)


def properties(cost_s: float, is_first: bool) -> list[tuple[str, object]]:
    return [(_COST, cost_s), (_IS_FIRST, is_first)]


def processor_s(*, of_children: bool) -> float:
    """Seconds of processor time that this process has used, and the children that it waited for. A test of the first
    ring has none; a server that ends with the session would be on the bill of whichever test is the last."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN) if of_children else (resource.RUSAGE_SELF,)
    used = map(resource.getrusage, kinds)
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


_BEGAN = pytest.StashKey[float]()


class Bill:
    """Of one run, in the process that shows it."""

    def __init__(self) -> None:
        self._costs: dict[str, float] = {}
        self._first: set[str] = set()
        self._limit_s = float(tomllib.loads(BUDGETS.read_text())["tests"]["processor_s_per_test"])

    @property
    def too_dear(self) -> list[str]:
        if os.environ.get("MUTANT_UNDER_TEST"):  # mutmut counts the calls of each function: another cost
            return []
        return [name for name in self._first if self._costs[name] > self._limit_s]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and _COST in (found := dict(report.user_properties)):
            self._costs[report.nodeid] = float(str(found[_COST]))
            if found[_IS_FIRST]:
                self._first.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.too_dear and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        for name in self.too_dear:
            limit = f"the {self._limit_s:g} s that budgets.toml allows"
            terminalreporter.write_line(f"TOO DEAR: {name} took {self._costs[name]:.1f} s, more than {limit}", red=True)
        if len(self._costs) <= SHOWN:
            return
        dearest = sorted(self._costs.items(), key=lambda cost: -cost[1])[:SHOWN]
        total_s = sum(self._costs.values())
        terminalreporter.section(
            f"processor time: {total_s:.0f} s, of which {sum(s for _, s in dearest):.0f} s in these"
        )
        for name, cost_s in dearest:
            terminalreporter.write_line(f"{cost_s:6.2f} s  {name}")
