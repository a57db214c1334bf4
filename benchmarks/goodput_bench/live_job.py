"""A launcher with its workers: started, watched, and ended with every process that it started."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from restart import Losses, stop

from flyball.contracts.clock import SystemClock
from goodput_bench.sides import Line
from simulator.inject.processes import LiveProcess, environment_of, look_at, own_processes, send, wait_ended

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_INTERVAL_S = 0.02
RUN_VARIABLE = "GOODPUT_BENCH_RUN"  # folder of the run, in the environment of all its processes
QUIET_S = 5.0  # without a step of all ranks for this long, the job counts as not training
_READER_TIMEOUT_S = 5.0
_KILL_ROUNDS = 3
_KILL_TIMEOUT_S = 30.0
_LAST_LINES = 20


class LiveJob:
    """A context manager: the job runs inside. No process of it runs afterwards, however the block ends."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], world_size: int) -> None:
        self._command, self._environment = list(command), {**environment, RUN_VARIABLE: str(folder)}
        self._folder, self.world_size = folder, world_size
        self._losses = Losses(folder / "losses", world_size)
        self._clock = SystemClock()
        self._progress = (-1, 0)  # generation, steps that all its ranks completed
        self._progress_s = 0.0
        self.lines: list[Line] = []
        self.launched_at = 0.0

    def __enter__(self) -> Self:
        self.launched_at = self._clock.wall_s()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _uninterrupted():
            stop(self._process, self._losses)
            self._kill_leftovers()
            self._reader.join(_READER_TIMEOUT_S)

    @property
    def has_trained(self) -> bool:
        return self._progress[1] > 0

    @property
    def is_training(self) -> bool:
        return self.has_trained and time.monotonic() - self._progress_s < QUIET_S

    @property
    def quiet_s(self) -> float:
        """Seconds since all ranks last completed a step."""
        return time.monotonic() - self._progress_s

    def poll(self) -> str:
        """Update the progress. Returns why the job is over, or ''."""
        self._losses.pull()
        generation = self._losses.generation()
        progress = (generation, min(len(by.get(generation, ())) for by in self._losses.steps.values()))
        if progress[1] and progress != self._progress:
            self._progress, self._progress_s = progress, time.monotonic()
        code = self._process.poll()
        return "" if code is None else f"the launcher ended by itself with exit code {code}"

    def last_output(self) -> str:
        return "\n".join(line.text for line in self.lines[-_LAST_LINES:])

    def process_of(self, rank: int) -> LiveProcess | None:
        """The process that trains as `rank`: its pid file names it, and it has the rank's loss file open."""
        with suppress(OSError, ValueError):
            process = look_at(int((self._folder / f"rank{rank}.pid").read_text()))
            if process is not None and _has_open(process.pid, self._losses.path(rank)):
                return process
        return None

    def _kill_leftovers(self) -> None:
        """Kill what a killed launcher left behind. All of it inherited the launcher's environment."""
        for _ in range(_KILL_ROUNDS):  # a process may start another before it dies
            left = [p for p in own_processes() if environment_of(p).get(RUN_VARIABLE) == str(self._folder)]
            for process in left:
                send(process, signal.SIGKILL)
            wait_ended(left, timeout_s=_KILL_TIMEOUT_S, clock=self._clock)

    def _read(self, output: IO[bytes]) -> None:
        with output, (self._folder / "output.log").open("wb") as log:
            for data in output:
                self.lines.append(Line(self._clock.wall_s(), data.decode(errors="replace").rstrip()))
                log.write(data)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay signals until the end: they would cut the clean-up short."""
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda found, _frame: received.append(found)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _has_open(pid: int, path: Path) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            if descriptor.readlink() == path:
                return True
    return False
