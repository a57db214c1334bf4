"""Set up a virtual environment for this checkout, with progress; called by `make`.

    python3 deploy/set_up_venv.py .venv            what Flyball needs to run
    python3 deploy/set_up_venv.py .venv --dev      the developers' tools, too
    python3 deploy/set_up_venv.py .venv-docs --over .venv --extra docs
                                                   an extra of Flyball's, in an environment that has all packages of
                                                   .venv as well; with --no-deps FILE also the packages that FILE
                                                   lists, without what they need

Needs only Python. On a terminal one line shows pip's progress; elsewhere there is a line per stage, and one every ten
seconds. pip's full output is in VENV/set-up.log; its end is shown if a stage fails.
"""

from __future__ import annotations

import argparse
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
STAGE_DEADLINE_S = 3600.0
TERMINAL_LOOK_S = 0.5
LOG_LOOK_S = 10.0
SHOWN_OF_A_FAILURE = 25  # lines


class StageFailed(Exception):
    """A set-up command failed; its output has been shown."""


class Stage:
    """One command: its title and duration go to the screen, its output to a log."""

    def __init__(self, title: str, log: Path | None) -> None:
        self.title, self.log = title, log
        self.terminal = sys.stdout.isatty()
        self.started = time.monotonic()
        self.said_at = self.started

    def run(self, command: list[str]) -> None:
        if not self.terminal:
            print(f"{self.title} ...", flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(process, lines), daemon=True).start()
        kept, latest, ended = [], "", False
        while not ended:
            try:
                line = lines.get(timeout=TERMINAL_LOOK_S)
                ended = line is None
                if line and line.strip():
                    kept.append(line)
                    latest = line.strip() if _tells_of_progress(line) else latest
            except queue.Empty:
                pass
            if not ended:
                self._show(latest)
            if time.monotonic() - self.started > STAGE_DEADLINE_S:
                process.kill()
                kept.append(f"killed: it took more than {STAGE_DEADLINE_S:.0f} s\n")
        code = process.wait()
        if self.log:
            with self.log.open("a") as file:
                file.writelines([f"$ {' '.join(command)}\n", *kept])
        self._end("done" if code == 0 else f"FAILED with exit code {code}")
        if code:
            sys.stderr.writelines(kept[-SHOWN_OF_A_FAILURE:])
            raise StageFailed

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def _show(self, latest: str) -> None:
        now = time.monotonic()
        if now - self.said_at < (TERMINAL_LOOK_S if self.terminal else LOG_LOOK_S):
            return
        self.said_at = now
        text = f"{self.title}  {now - self.started:.0f} s  {latest}"
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:{width}}", end="", flush=True)
        else:
            print(f"  {now - self.started:.0f} s: {latest[:150]}", flush=True)

    def _end(self, word: str) -> None:
        text = f"{self.title}  {word} ({time.monotonic() - self.started:.0f} s)"
        if self.terminal:
            print(f"\r{text:{shutil.get_terminal_size().columns - 1}}", flush=True)
        else:
            print(text, flush=True)


def _tells_of_progress(line: str) -> bool:
    """Whether pip's line is about a package, not a detail or warning."""
    return line.lstrip().startswith(("Collecting", "Downloading", "Processing", "Building", "Installing", "Obtaining"))


def torch_requirement() -> str:
    """The torch release in constraints.txt. It is installed first because it takes longest."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("torch=="):
            return line.strip()
    return "torch"


def set_up(venv: Path, *, dev: bool) -> None:
    python = venv / "bin" / "python"
    total = 4 if dev else 3
    print(f"Setting up {venv} (only once).", flush=True)
    if not (venv / "bin" / "pip").exists():
        Stage(f"[1/{total}] virtual environment", None).run([sys.executable, "-m", "venv", str(venv)])
    log = venv / "set-up.log"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--constraint", "constraints.txt"]
    Stage(f"[2/{total}] PyTorch", log).run([*pip, torch_requirement()])
    Stage(f"[3/{total}] Flyball and what it needs", log).run([*pip, "--editable", "."])
    if dev:
        Stage(f"[4/{total}] developers' tools", log).run([*pip, "--editable", ".[dev]"])


def set_up_over(venv: Path, base: Path, extra: str, no_deps: Path | None) -> None:
    """An environment whose packages come before those of `base`, so that neither torch nor the tools are installed
    twice, and `base` stays as it is."""
    print(f"Setting up {venv} (only once).", flush=True)
    total = 3 if no_deps else 2
    if not (venv / "bin" / "pip").exists():
        Stage(f"[1/{total}] virtual environment", None).run([sys.executable, "-m", "venv", str(venv)])
    folders = [next(one.glob("lib/python*/site-packages")) for one in (venv, base)]
    (folders[0] / "over.pth").write_text(f"import site; site.addsitedir({str(folders[1])!r})\n")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    what, log = f"[2/{total}] Flyball's extra '{extra}'", venv / "set-up.log"
    Stage(what, log).run([*pip, "--constraint", "constraints.txt", "--editable", f".[{extra}]"])
    if no_deps:
        Stage(f"[3/3] {no_deps.name}", log).run([*pip, "--no-deps", "--requirement", str(no_deps)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up a virtual environment for this checkout.")
    parser.add_argument("venv", type=Path)
    parser.add_argument("--dev", action="store_true", help="also install the tools for test and lint")
    parser.add_argument("--over", type=Path, metavar="VENV", help="only add to the packages of this environment")
    parser.add_argument("--extra", default="", help="with --over: the extra of Flyball that is installed")
    parser.add_argument("--no-deps", type=Path, metavar="FILE", help="with --over: packages to install alone")
    options = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"Flyball needs Python 3.11 or newer; {sys.executable} is {found}.", file=sys.stderr)
        print("Next step: make PYTHON=/path/to/python3.11", file=sys.stderr)
        return 2
    venv: Path = options.venv.absolute()
    try:
        if options.over:
            set_up_over(venv, options.over.absolute(), options.extra, options.no_deps and options.no_deps.absolute())
        else:
            set_up(venv, dev=options.dev)
    except StageFailed:
        if not (venv / "bin" / "pip").exists():
            print("Next step on Debian and Ubuntu: apt-get install python3-venv", file=sys.stderr)
        else:
            print(f"Next step: fix the error above, then run make again. Log: {venv}/set-up.log", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
