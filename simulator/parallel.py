"""Does many pieces of work in processes of their own.

Which process does what, and when it ends, changes nothing. The processes are spawned, get their work as JSON, and end
with their parent, however that ends. Ctrl-C ends them at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from flyball.contracts import wire
from flyball.process_start import end_with_parent

_END_S = 5.0

A = TypeVar("A")
R = TypeVar("R")


class Work(NamedTuple, Generic[A, R]):
    """A function of a module, and the types of what it is given and returns, for JSON."""

    function: Callable[[A], R]
    given: Any  # a type; a union is none to a type checker
    returned: type[R]


class NoResult(NamedTuple):
    """Why a piece of work has no result."""

    why: str


class _PieceAnswer(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


def usable_cores() -> int:
    """How many processes can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def results(work: Work[A, R], pieces: Sequence[A], processes: int) -> Generator[tuple[int, R | NoResult], None, None]:
    """Each result with the place of its piece, as they come. Whoever stops reading ends the processes."""
    with _Processes(work, min(processes, len(pieces))) as started:
        yield from started.do(pieces)


class _Processes(Generic[A, R]):
    def __init__(self, work: Work[A, R], count: int) -> None:
        self._work, self._count = work, count
        self._processes: dict[Connection, SpawnProcess] = {}

    def __enter__(self) -> _Processes[A, R]:
        context = get_context("spawn")
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they inherit that: this process ends them
        try:
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_do_pieces, args=(theirs, self._work), daemon=True)
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

    def do(self, pieces: Sequence[A]) -> Iterator[tuple[int, R | NoResult]]:
        left = iter(range(len(pieces)))
        busy: dict[Connection, int] = {}
        for connection in self._processes:
            self._give(connection, pieces, left, busy)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                number = busy.pop(ready)
                answer = self._answer(ready)
                if not isinstance(answer, NoResult) or self._processes[ready].is_alive():
                    self._give(ready, pieces, left, busy)
                yield number, answer

    def _give(self, to: Connection, pieces: Sequence[A], left: Iterator[int], busy: dict[Connection, int]) -> None:
        number = next(left, None)
        if number is not None:
            busy[to] = number
            with suppress(OSError):  # the process is gone, as its answer will say
                to.send_bytes(msgspec.json.encode(pieces[number]))

    def _answer(self, source: Connection) -> R | NoResult:
        try:
            answer = wire.decoder_of(_PieceAnswer).decode(source.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[source]
            process.join(_END_S)
            return NoResult(f"its process ended with exit code {process.exitcode}")
        return NoResult(answer.error) if answer.error else wire.decoder_of(self._work.returned).decode(answer.result)


def _do_pieces(parent: Connection, work: Work[A, R]) -> None:
    """What a process does until its parent closes the connection, or ends."""
    end_with_parent()
    origin = parent_process()
    if origin is None or not origin.is_alive():  # it died before the line above
        return
    while True:
        try:
            piece = wire.decoder_of(work.given).decode(parent.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = _PieceAnswer(result=msgspec.Raw(msgspec.json.encode(work.function(piece))))
        except Exception as error:  # noqa: BLE001 - the parent says which piece failed
            answer = _PieceAnswer(error=f"{type(error).__name__}: {error}".rstrip("."))
        parent.send_bytes(msgspec.json.encode(answer))
