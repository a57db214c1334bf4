"""The rings hold: what costs is marked, and a test of the first ring is refused what is not."""

from __future__ import annotations

import ast
import multiprocessing
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import costs, rings

TESTS = Path(__file__).parents[1]
FOLDERS = ("architecture", "conformance", "corruption", "property", "simulation", "unit")  # of the first ring
SLEEPERS = {"unit/cli/test_cli_runs.py": "a file system whose locks are slow"}


class Item:
    """What is asked of a test that pytest has collected."""

    def __init__(self, path: str, *, fixtures: tuple[str, ...] = (), mark: str = "", **parameters: object) -> None:
        self.path = TESTS / path
        self.nodeid = path
        self.fixturenames = fixtures
        self.marks = {mark}
        self.stash = pytest.Stash()
        self.user_properties: list[tuple[str, object]] = []
        if parameters:
            self.callspec = SimpleNamespace(params=parameters)

    def get_closest_marker(self, name: str) -> object:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def marked(path: str) -> Any:  # noqa: ANN401 - it stands for pytest's
    item: Any = Item(path)
    rings.mark([item])
    return item


@pytest.mark.parametrize(
    ("item", "ring"),
    [
        (Item("unit/control/test_a.py"), ""),
        (Item("conformance/test_a.py", kind="sqlite"), ""),
        (Item("conformance/test_a.py", kind="mariadb"), "processes"),
        (Item("unit/test_a.py", fixtures=("own_redis",)), "processes"),
        (Item("unit/test_a.py", mark="processes"), "processes"),
        (Item("integration/test_a.py"), "processes"),
        (Item("corruption/processes/test_a.py"), "processes"),
        (Item("integration/flows/test_a.py"), "proof"),
        (Item("corruption/processes/test_a.py", mark="proof"), "proof"),
        (Item("integration/test_a.py", mark="slow"), "slow"),
        (Item("rdma/test_a.py", mark="rdma"), "rdma"),
    ],
)
def test_a_test_is_in_one_ring(item: Any, ring: str) -> None:  # noqa: ANN401 - it stands for pytest's
    rings.mark([item])
    assert item.marks - {""} == ({ring} if ring else set())
    assert rings.is_first(item) is (ring == "")


def test_what_takes_longest_begins_first() -> None:
    paths = ["unit/a.py", "browser/a.py", "integration/a.py", "integration/flows/a.py", f"{rings.PROCESSES[0]}.py"]
    items: Any = [Item(path) for path in paths]
    rings.order(items)
    assert [item.nodeid for item in items] == [paths[4], paths[3], paths[2], paths[1], paths[0]]


@pytest.mark.processes
def test_the_first_ring_starts_no_process_and_asks_no_server() -> None:
    guard, item = rings.Guard(), Item("unit/test_a.py")

    def refused(act: Any) -> None:  # noqa: ANN401 - a function
        with guard.watching(item), suppress(PermissionError):  # type: ignore[arg-type]
            act()
        with pytest.raises(pytest.fail.Exception, match="Mark the test"):
            guard.judge()

    refused(lambda: subprocess.run([sys.executable, "-c", ""], check=False))
    refused(lambda: multiprocessing.get_context("spawn").Process(target=print).start())
    refused(lambda: socket.create_connection(("127.0.0.1", 3306)))
    with guard.watching(item):  # type: ignore[arg-type]
        subprocess.run(["git", "--version"], check=True, capture_output=True)
    guard.judge()
    with guard.watching(Item("integration/test_a.py", mark="processes")):  # type: ignore[arg-type]
        subprocess.run([sys.executable, "-c", ""], check=True)
    guard.judge()


def sleeps_in(source: str) -> list[int]:
    """The lines where what is not marked `processes` sleeps. `sleep(0)` only lets other threads run."""
    if "sleep(" not in source or re.search(r"^pytestmark = .*mark\.processes", source, re.MULTILINE):
        return []
    return [
        call.lineno
        for part in ast.parse(source).body
        if not any("mark.processes" in ast.unparse(mark) for mark in getattr(part, "decorator_list", ()))
        for call in ast.walk(part)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("time.sleep", "sleep")
        if [ast.unparse(argument) for argument in call.args] != ["0"]
    ]


def test_the_first_ring_sleeps_nowhere() -> None:
    """It waits for a condition (`support.clocks.waits.until`), or time is given to what it tests."""
    files = {str(path.relative_to(TESTS)): path for folder in FOLDERS for path in (TESTS / folder).rglob("*.py")}
    of_ring = {name for name in files if rings.is_first(marked(name))}
    assert {name for name in of_ring if sleeps_in(files[name].read_text())} == set(SLEEPERS)


def test_a_sleep_is_found_where_it_stands_for_time() -> None:
    sleep = "    time.sleep(0.1)\n"
    assert sleeps_in(f"def test_it():\n{sleep}") == [2]
    assert sleeps_in(f"@pytest.mark.processes\ndef test_it():\n{sleep}") == []
    assert sleeps_in(f"pytestmark = [pytest.mark.processes]\ndef test_it():\n{sleep}") == []
    assert sleeps_in("def test_it():\n    time.sleep(0)\n    run('import time; time.sleep(9)')\n") == []


def test_a_dear_test_of_the_first_ring_is_over_its_budget() -> None:
    bill = costs.Bill()
    for name, cost_s, is_first in (("cheap", 0.1, True), ("dear", 1e6, True), ("of another ring", 1e6, False)):
        report: Any = SimpleNamespace(when="teardown", nodeid=name, user_properties=costs.properties(cost_s, is_first))
        bill.pytest_runtest_logreport(report)
    assert bill.too_dear == ["dear"]
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    bill.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
