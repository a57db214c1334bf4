"""Runs ordinary training scripts under `flyball run`: Flyball must not mistake any of them for a fault.

    python benchmarks/ordinary_scripts.py                            all scripts, also under torchrun; a table
    python benchmarks/ordinary_scripts.py --load 4                   beside 4 busy processes
    python benchmarks/ordinary_scripts.py --only profiler --json     one script; one JSON object on stdout

The scripts in ordinary_scripts/ do what users' scripts do: evaluate, save, compile, profile, wait for data or for each
other, fork, print. Some use Flyball, some do not. Each must run to its end under Flyball without a restart, and with no
decisions except those that start and complete its job. Exit code 1 if one does not.

A script's second line lists its requirements: `# corpus: ranks=2 needs=tqdm,g++`. A script with missing requirements is
reported as skipped; `pip install 'flyball[ordinary]'` installs those on PyPI. OMP_NUM_THREADS is 1 everywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import pty
import re
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import psutil

CORPUS = Path(__file__).resolve().parent / "ordinary_scripts"
EXPECTED = frozenset({"start_job", "complete_job"})
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
BUSY = "while True:\n    pass\n"
STOP_DEADLINE_S = 60.0
LINES_OF_A_FAILURE = 15
LOOK_INTERVAL_S = 0.2
QUESTION = b"Go on? "


@dataclass(frozen=True)
class Script:
    """One script of the corpus, with the settings of its second line."""

    path: Path
    ranks: int
    needs: tuple[str, ...]
    answers_after_s: float | None  # delay before "yes" is typed when the script asks `Go on?` at its terminal

    @property
    def name(self) -> str:
        return self.path.stem

    def missing(self) -> list[str]:
        return [n for n in self.needs if not (shutil.which(n) if n == "g++" else importlib.util.find_spec(n))]


@dataclass(frozen=True)
class Ended:
    """How one command ended."""

    code: int | None  # None: stopped at the time limit
    seconds: float
    output_tail: str


@dataclass
class Row:
    """The result of one script."""

    script: str
    ranks: int
    skipped: str = ""  # the reason
    torchrun_s: float | None = None
    flyball_s: float | None = None
    restarts: int = 0
    decisions: list[dict[str, object]] = field(default_factory=list)  # all except start and completion
    problems: list[str] = field(default_factory=list)
    output_tail: str = ""  # of a command that failed

    @property
    def slowdown(self) -> float | None:
        return round(self.flyball_s / self.torchrun_s, 2) if self.flyball_s and self.torchrun_s else None


def corpus(folder: Path, only: Sequence[str]) -> list[Script]:
    found = [_script(path) for path in sorted(folder.glob("*.py"))]
    unknown = set(only) - {script.name for script in found}
    if unknown:
        raise SystemExit(f"ordinary_scripts: there is no {', '.join(sorted(unknown))} in {folder}")
    return [script for script in found if not only or script.name in only]


def _script(path: Path) -> Script:
    header = re.search(r"^# corpus: (.+)$", path.read_text(), re.MULTILINE)
    if not header:
        raise SystemExit(f"ordinary_scripts: {path} has no line '# corpus: ranks=N'")
    words = dict(word.split("=", 1) for word in header[1].split())
    after = words.get("answers-after")
    needs = tuple(words["needs"].split(",")) if "needs" in words else ()
    return Script(path, int(words["ranks"]), needs, float(after) if after else None)


def torchrun(script: Script) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(script.ranks), str(script.path)]


def flyball(script: Script, state: Path) -> list[str]:
    launcher = [str(Path(sys.executable).parent / "flyball"), "run", "--nproc-per-node", str(script.ranks)]
    return [*launcher, "--state-dir", str(state), "--job", script.name.replace("_", "-"), str(script.path)]


def execute(command: list[str], script: Script, folder: Path, timeout_s: float) -> Ended:
    """Run a command. At the time limit, end it and everything that it started."""
    log = folder / "output.log"
    began = time.monotonic()
    with log.open("wb") as output, _keyboard(script.answers_after_s, output) as terminal:
        process = subprocess.Popen(
            command if terminal is None else ["setsid", "--ctty", *command],  # its controlling terminal, as in a shell
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=output if terminal is None else terminal,
            stderr=output if terminal is None else terminal,
            cwd=folder,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=terminal is None,
        )
        code: int | None = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            seconds = time.monotonic() - began
            if code is None:
                _end(process)
    tail = "\n".join(log.read_text(errors="replace")[-20_000:].splitlines()[-LINES_OF_A_FAILURE:])
    return Ended(code, round(seconds, 2), tail)


@contextmanager
def _keyboard(answers_after_s: float | None, output: IO[bytes]) -> Iterator[int | None]:
    """A terminal that answers the script's question and copies its screen to `output`; None if there is no question."""
    if answers_after_s is None:
        yield None
        return
    leader, follower = pty.openpty()
    screen = threading.Thread(target=_watch_screen, args=(leader, output, answers_after_s), daemon=True)
    screen.start()
    try:
        yield follower
    finally:
        os.close(follower)
        screen.join(STOP_DEADLINE_S)
        os.close(leader)


def _watch_screen(terminal: int, output: IO[bytes], answers_after_s: float) -> None:
    """Copy the screen to `output`, and type "yes" `answers_after_s` after the question."""
    shown, asked_at, answered = b"", 0.0, False
    with suppress(OSError):  # raised when the other end is closed
        while True:
            if select.select([terminal], [], [], LOOK_INTERVAL_S)[0]:
                part = os.read(terminal, 65536)
                output.write(part)
                shown += part
            if QUESTION in shown and not answered:
                asked_at = asked_at or time.monotonic()
                if time.monotonic() - asked_at >= answers_after_s:
                    answered = bool(os.write(terminal, b"yes\n"))


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_DEADLINE_S)
        for member in [*family, psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait(STOP_DEADLINE_S)


def decisions_in(state: Path) -> list[dict[str, object]]:
    """The decisions of the run's supervisor, oldest first, from its database."""
    database = state / "supervisor" / "flyball.sqlite"
    if not database.exists():
        return []
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        documents = connection.execute("SELECT document FROM decisions ORDER BY number").fetchall()
    decisions = [json.loads(document) for (document,) in documents]
    return [{key: decision[key] for key in ("kind", "rule", "reason", "at")} for decision in decisions]


def generations_in(state: Path) -> int:
    database = state / "supervisor" / "flyball.sqlite"
    if not database.exists():
        return 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        [[count]] = connection.execute("SELECT COUNT(*) FROM generations").fetchall()
    return int(count)


def measure(script: Script, launchers: Sequence[str], timeout_s: float) -> Row:
    row = Row(script.name, script.ranks)
    if missing := script.missing():
        row.skipped = f"{', '.join(missing)} not installed"
        return row
    with tempfile.TemporaryDirectory(prefix="fb-corpus-") as name:
        folder = Path(name)
        if "torchrun" in launchers:
            row.torchrun_s = _take(row, "torchrun", execute(torchrun(script), script, folder, timeout_s))
        if "flyball" in launchers:
            state = folder / "s"
            row.flyball_s = _take(row, "flyball", execute(flyball(script, state), script, folder, timeout_s))
            row.decisions = [d for d in decisions_in(state) if d["kind"] not in EXPECTED]
            row.restarts = max(0, generations_in(state) - 1)
            row.problems += [f"decision {decision['kind']}: {decision['reason']}" for decision in row.decisions]
    return row


def _take(row: Row, launcher: str, ended: Ended) -> float | None:
    if ended.code != 0:
        row.problems.append(
            f"{launcher}: " + ("did not end in time" if ended.code is None else f"exit code {ended.code}")
        )
        row.output_tail = ended.output_tail
        return None
    return ended.seconds


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that keep the CPU busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(STOP_DEADLINE_S)


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'script':24} ranks  decisions  restarts  torchrun   flyball  slowdown"]
    for row in rows:
        if row.skipped:
            lines.append(f"{row.script:24} {row.ranks:5}  skipped: {row.skipped}")
            continue
        times = [f"{seconds:.1f} s" if seconds is not None else "-" for seconds in (row.torchrun_s, row.flyball_s)]
        slowdown = f"{row.slowdown:.2f}" if row.slowdown is not None else "-"
        lines.append(
            f"{row.script:24} {row.ranks:5}  {len(row.decisions):9}  {row.restarts:8}  {times[0]:>8}  {times[1]:>8}"
            f"  {slowdown:>8}"
        )
        lines += [f"    {problem}" for problem in row.problems]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Decisions about ordinary scripts, and their slowdown against torchrun."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run only this script; may be repeated"
    )
    parser.add_argument("--corpus", type=Path, default=CORPUS, metavar="DIR", help="folder of your own scripts")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy processes to run beside each script")
    parser.add_argument("--launcher", choices=["flyball", "torchrun", "both"], default="both")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="limit for one script under one launcher")
    options = parser.parse_args()
    launchers = ["torchrun", "flyball"] if options.launcher == "both" else [options.launcher]

    rows = []
    load_average_1m = os.getloadavg()[0]
    with busy(options.load):
        for script in corpus(options.corpus, options.only):
            rows.append(measure(script, launchers, options.timeout_s))
            print(table(rows[-1:]).splitlines()[1], file=sys.stderr, flush=True)
            if rows[-1].output_tail:
                print(rows[-1].output_tail, file=sys.stderr, flush=True)
    ok = not any(row.problems for row in rows)
    if options.json:
        result = {
            "schema": "flyball.benchmark.ordinary_scripts.v1",
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "busy_processes": options.load,
            "load_average_before_1m": round(load_average_1m, 2),
            "environment": ENVIRONMENT,
            "scripts": [{**asdict(row), "slowdown": row.slowdown} for row in rows],
            "ok": ok,
        }
        print(json.dumps(result, indent=2))
    else:
        print(table(rows))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
