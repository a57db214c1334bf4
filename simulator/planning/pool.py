"""Runs many scenarios in processes of their own, and returns their outcomes in the order asked for.

Which process runs what, and when it ends, changes nothing: each run depends on its scenario and seed alone. Workers are
spawned, get their work as JSON, and end with their parent. Ctrl-C ends them at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

import msgspec

from flyball.contracts import wire
from flyball.contracts.errors import FlyballError
from simulator.fleet.result import simulate
from simulator.fleet.scenario import FleetScenario
from simulator.planning.outcome import RunOutcome, outcome_of

_END_S = 5.0


class PlannedRun(NamedTuple):
    """A scenario to run with a seed. `name` is what messages call it."""

    name: str
    scenario: FleetScenario
    seed: int


class _RunAnswer(msgspec.Struct):
    outcome: RunOutcome | None = None
    error: str = ""


def usable_cores() -> int:
    """How many processes can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(runs: Sequence[PlannedRun], jobs: int, ended: Callable[[], None] = lambda: None) -> list[RunOutcome]:
    """Run all with `jobs` processes; with one, in this process. `ended` is called after each run."""
    if min(jobs, len(runs)) <= 1:
        found = []
        for run in runs:
            found.append(_outcome(run))
            ended()
        return found
    with _RunProcesses(min(jobs, len(runs))) as workers:
        return workers.run(runs, ended)


def _outcome(run: PlannedRun) -> RunOutcome:
    return outcome_of(simulate(run.scenario, run.seed, run.name).result, run.scenario)


class _RunProcesses:
    """Spawned processes. However this ends, they end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: dict[Connection, SpawnProcess] = {}

    def __enter__(self) -> _RunProcesses:
        context = get_context("spawn")
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit that: this process ends them
        try:
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process
        finally:
            signal.signal(signal.SIGINT, before)
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.terminate()
        for process in self._processes.values():
            process.join(_END_S)
            if process.exitcode is None:
                process.kill()
                process.join()

    def run(self, runs: Sequence[PlannedRun], ended: Callable[[], None]) -> list[RunOutcome]:
        outcomes: dict[int, RunOutcome] = {}
        left = iter(range(len(runs)))
        busy: dict[Connection, int] = {}
        for connection in self._processes:
            self._give(connection, runs, left, busy)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                number = busy.pop(ready)
                outcomes[number] = self._answer(ready, runs[number])
                ended()
                self._give(ready, runs, left, busy)
        return [outcomes[number] for number in range(len(runs))]

    def _give(
        self, to: Connection, runs: Sequence[PlannedRun], left: Iterator[int], busy: dict[Connection, int]
    ) -> None:
        number = next(left, None)
        if number is not None:
            run = runs[number]
            busy[to] = number
            to.send_bytes(msgspec.json.encode((run.name, run.seed, run.scenario.model_dump_json())))

    def _answer(self, source: Connection, run: PlannedRun) -> RunOutcome:
        try:
            answer = wire.decoder_of(_RunAnswer).decode(source.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[source]
            process.join(_END_S)
            answer = _RunAnswer(error=f"its process ended with exit code {process.exitcode}")
        if answer.outcome is None:
            raise FlyballError(
                f"The run of {run.name} with seed {run.seed} failed: {answer.error}.",
                hint=f"see it alone: flyball simulate run {run.name} --seed {run.seed}",
            )
        return answer.outcome


def _work(parent: Connection) -> None:
    """What a worker does until its parent closes the connection, or ends."""
    while True:
        try:
            name, seed, text = wire.decoder_of(tuple[str, int, str]).decode(parent.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = _RunAnswer(outcome=_outcome(PlannedRun(name, FleetScenario.model_validate_json(text), seed)))
        except Exception as error:  # noqa: BLE001 - the parent raises it, with the run's name and seed
            answer = _RunAnswer(error=f"{type(error).__name__}: {error}".rstrip("."))
        parent.send_bytes(msgspec.json.encode(answer))
