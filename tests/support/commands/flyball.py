"""`flyball` commands in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from support.clocks.waits import DEADLINE_S, until
from support.commands.own_processes import kill_all, processes_of
from support.commands.run_folders import environment_of

FLYBALL = (sys.executable, "-m", "flyball.cli.main")


def run_flyball(place: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder to its end. `run_here` is cheaper for commands that start no processes."""
    return subprocess.run(
        [*FLYBALL, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=place,
        env=environment_of(place, **environ),
    )


class FlyballProcess:
    """A command that runs in a folder, with what it prints in files there."""

    def __init__(
        self, place: Path, *words: str, cwd: Path | None = None, stdout: int | None = None, **environ: str
    ) -> None:
        """`environ`: besides the variables that keep state and shared memory in the folder."""
        self.place = place
        self.words = words
        stem = f"printed-{time.monotonic_ns()}"
        self._out, self._err = place / f"{stem}.out", place / f"{stem}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*FLYBALL, *words],
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                cwd=cwd or place,
                env=environment_of(place, **environ),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.err + self.out

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:  # noqa: ANN401 - what was found
        """Wait for something that happens before the command ends."""

        def look() -> Any:  # noqa: ANN401 - what was found
            found = condition()
            assert found or self.is_running, f"it ended before {what}: {self.text}"
            return found

        try:
            return until(look, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from error

    def facts(self) -> dict[str, Any]:
        """What `flyball up -o json` prints first."""
        self.wait_for(lambda: self.out.endswith("}\n"), "the facts")
        found: dict[str, Any] = json.loads(self.out)
        return found

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait for its end; its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it does not end: {self.text}") from None

    def send(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.end()

    def close(self) -> int:
        """End it, if it has not ended."""
        if self.is_running:
            self.process.send_signal(signal.SIGINT)
        return self.end()

    def kill_everything(self) -> None:
        """Kill the command, and all else that belongs to its folder."""
        self.process.kill()
        self.process.wait()
        kill_all(lambda: processes_of(self.place))


def ended(processes: Iterable[FlyballProcess]) -> list[tuple[int, str, str]]:
    """The exit codes of some commands, and what they printed."""
    return [(process.end(), process.out, process.err) for process in processes]
