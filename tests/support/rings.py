"""The rings of tests by cost, and what holds a test to its ring.

Ring 1, `make test`: in process, with SQLite, memory and folders. It starts no process and asks no server: whatever
tries to fails the test, by an audit hook of the interpreter. Everything else is marked: by its folder, by a fixture or
a parameter that names a server, or by hand with `pytest.mark.processes`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import PurePath
from typing import Any

import pytest

# Whole clusters that are killed again and again, the command line's flows from start to end, and the benchmarks at
# their smallest: `make proofs`. In this order, the files that take longest first.
PROOFS = (
    "integration/flows/test_cli_leaving",
    "integration/flows/test_cli_go_on",
    "integration/recovery/parts/",
    "integration/recovery/test_recovery_services_away",
    "integration/recovery/test_recovery_four_faults",
    "integration/recovery/test_recovery_old_database",
    "integration/flows/test_cli_demo.py",
    "integration/benchmarks/test_benchmark_goodput.py",
    "integration/recovery/",
    "first_contact/",
    "integration/flows/",
    "integration/benchmarks/",
)
# One file goes to one worker. What waits longest begins first, and the many short files fill up the rest.
PROCESSES = (
    "corruption/processes/test_kill_matrix",
    "integration/engine/test_reshard_processes",
    "integration/engine/test_load_step_processes",
    "integration/",
    "corruption/processes/",
    "browser/",
)
# A parameter or a fixture with one of these names needs a server, or another process.
SERVERS = frozenset({"mariadb", "redis", "s3"})
OF_SERVERS = frozenset({"own_redis", "redis_of_module", "mariadb_url", "own_mariadb", "s3_endpoint", "warm_python"})
ELSEWHERE = ("slow", "first_hour", "frameworks", "compose", "gpu", "rdma")  # markers of targets of their own

_STARTS = frozenset(
    {"multiprocessing.spawn", "subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system", "pty.spawn"}
)
_OTHERS = frozenset({"git", "lint-imports"})  # programs that the first ring may ask: each takes a moment, once or twice
_SERVER_PORTS = frozenset({3306, 6379})


def place(item: pytest.Item, folders: tuple[str, ...]) -> int | None:
    """Which of these folders and files of tests/ the test is in: the first one's number."""
    path = str(item.path)
    return next((n for n, name in enumerate(folders) if f"/tests/{name}" in path), None)


def needs_a_server(item: pytest.Item) -> bool:
    parameters = getattr(item, "callspec", None)
    named = {value for value in parameters.params.values() if isinstance(value, str)} if parameters else set()
    return bool(named & SERVERS or OF_SERVERS & set(getattr(item, "fixturenames", ())))


def mark(items: list[pytest.Item]) -> None:
    """Mark each test that is not of the first ring."""
    for item in items:
        if place(item, PROOFS) is not None:
            item.add_marker(pytest.mark.proof)
        elif any(item.get_closest_marker(name) for name in ("proof", *ELSEWHERE)):
            continue
        elif place(item, PROCESSES) is not None or needs_a_server(item):
            item.add_marker(pytest.mark.processes)


def is_first(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("processes", "proof", *ELSEWHERE))


def order(items: list[pytest.Item]) -> None:
    """Longest first, for workers that share them file by file."""
    folders = (*PROCESSES[:1], *PROOFS, *PROCESSES[1:])
    items.sort(key=lambda item: len(folders) if (found := place(item, folders)) is None else found)


class Guard:
    """Refuses what a test of the first ring may not do. An audit hook stays for good, so a process has one guard."""

    def __init__(self) -> None:
        self._is_on = False
        self._refused: list[str] = []
        sys.addaudithook(self._hook)
        spawn = util.spawnv_passfds

        def refused_or_spawned(path: bytes, *arguments: Any) -> int:  # noqa: ANN401 - multiprocessing's own
            self._hook("multiprocessing.spawn", (path,))
            return int(spawn(path, *arguments))

        util.spawnv_passfds = refused_or_spawned  # of which the interpreter tells no audit hook

    @contextmanager
    def watching(self, item: pytest.Item) -> Iterator[None]:
        self._is_on = is_first(item)
        self._refused.clear()
        try:
            yield
        finally:
            self._is_on = False

    def judge(self) -> None:
        """Fail the test if it tried, also where the refusal was caught."""
        refused, self._refused = self._refused, []
        if refused:
            pytest.fail(f"{refused[0]} Mark the test with pytest.mark.processes.", pytrace=False)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event in _STARTS and not (event == "subprocess.Popen" and PurePath(str(args[0])).name in _OTHERS):
            self._refuse(f"A test of the first ring starts a process: {event} {args[0] if args else ''}.")
        elif event == "socket.connect" and isinstance(args[1], tuple) and args[1][1] in _SERVER_PORTS:
            self._refuse(f"A test of the first ring asks the server on port {args[1][1]}.")

    def _refuse(self, what: str) -> None:
        self._refused.append(what)
        raise PermissionError(what)
