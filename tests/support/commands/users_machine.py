"""The machine of somebody who installs Flyball from its wheel: an environment outside the repository, a home, commands.

By default the environment borrows the other packages (torch is large) of the interpreter that runs the tests, and only
Flyball is installed. With FLYBALL_FIRST_HOUR_INSTALL=full, pip installs all of it, torch first, as a user has it.
With FLYBALL_FIRST_HOUR_FOLDER=DIR it is kept in DIR, for the next call of the tests.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
INSTALL_DEADLINE_S = 900.0
COMMAND_DEADLINE_S = 240.0
END_DEADLINE_S = 30.0
LOOK_INTERVAL_S = 0.05
NOT_A_USERS = ("FLYBALL_", "PET_", "TORCHELASTIC_", "OMP_", "PYTEST_", "PYTHON", "XDG_", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Installation:
    """An environment, the wheel installed into it, and whether pip installed everything else too."""

    folder: Path
    wheel: Path
    full: bool
    torch_untouched: bool  # by installing Flyball

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))


def install_once(shared: Path) -> Installation:
    """Build the wheel and install it below `shared`, unless another test process has done so."""
    shared = Path(os.environ.get("FLYBALL_FIRST_HOUR_FOLDER") or shared)
    done, full = shared / "first-hour" / "done", os.environ.get("FLYBALL_FIRST_HOUR_INSTALL") == "full"
    done.parent.mkdir(exist_ok=True)
    with (done.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _install(done.parent, full=full)
            done.touch()
    wheel = next((done.parent / "wheel").glob("flyball-*.whl"))
    return Installation(
        done.parent / "env", wheel, full, torch_untouched=not (done.parent / "torch-was-touched").exists()
    )


def _install(folder: Path, *, full: bool) -> None:
    env = folder / "env"
    _checked([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder / "wheel"), str(ROOT)])
    _checked([sys.executable, "-m", "venv", str(env)])
    wheel = str(next((folder / "wheel").glob("flyball-*.whl")))
    pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--constraint", str(ROOT / "constraints.txt")]
    if not full:
        site_packages = next(env.glob("lib/python*/site-packages"))
        (site_packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        _checked([*pip, "--no-deps", "--ignore-installed", wheel])
        return
    _checked([*pip, "torch"])
    before = _files_of_torch(env)
    _checked([*pip, wheel])
    if _files_of_torch(env) != before:
        (folder / "torch-was-touched").touch()


def _files_of_torch(env: Path) -> dict[str, int]:
    [record] = env.glob("lib/python*/site-packages/torch-*.dist-info/RECORD")
    return {str(record): record.stat().st_mtime_ns}


def _checked(command: list[str]) -> None:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, cwd=tempfile.gettempdir()
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@contextmanager
def new_home() -> Iterator[Path]:
    """An empty folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="fh-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@dataclass
class User:
    """A user at a terminal, with `flyball` on the PATH and a folder with scripts."""

    installation: Installation
    home: Path
    more: dict[str, str] = field(default_factory=dict)  # variables

    def __post_init__(self) -> None:
        for folder in (self.work, self.shm):
            folder.mkdir()

    @property
    def work(self) -> Path:
        return self.home / "work"

    @property
    def shm(self) -> Path:
        return self.home / "shm"

    def environment(self) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith(NOT_A_USERS)}
        path = f"{self.installation.bin}{os.pathsep}{mine['PATH']}"
        own = {"HOME": str(self.home), "PATH": path, "FLYBALL_SHM_DIR": str(self.shm), "COLUMNS": "120"}
        return mine | own | self.more

    def start(self, command: str, *, stdout: int | None = None, stderr: int | None = None) -> Command:
        """Start a command line in the user's shell."""
        return Command(self, command, stdout, stderr)

    def run(self, command: str, *, code: int | None = 0, timeout_s: float = COMMAND_DEADLINE_S) -> str:
        """Run a command line and return its output, both streams. `code` is the expected exit code, None for any."""
        started = self.start(command)
        started.wait(timeout_s)
        assert code is None or started.process.returncode == code, f"$ {command}\n{started.text()}"
        return started.text()

    def script(self, name: str, text: str) -> Path:
        path = self.work / name
        path.write_text(text)
        return path

    def processes(self) -> list[psutil.Process]:
        """All processes with the user's home in their environment, working folder or command line."""
        home, found = str(self.home), []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = [process.environ().get("HOME", ""), process.cwd(), *process.cmdline()]
                if any(home in word for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end_all(self) -> list[str]:
        """End whatever still runs shortly after the last command, and return its command lines."""
        deadline = time.monotonic() + END_DEADLINE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(LOOK_INTERVAL_S)
        named = []
        for process in left:
            with suppress(psutil.Error):
                named.append(" ".join(process.cmdline()))
                process.kill()
        psutil.wait_procs(left, timeout=END_DEADLINE_S)
        return named

    def shared_memory(self) -> list[str]:
        return [path.name for path in self.shm.iterdir()]


class Command:
    """A running command, and its output so far."""

    def __init__(self, user: User, command: str, stdout: int | None, stderr: int | None) -> None:
        self.user, self.command = user, command
        self.log = user.home / f"command-{len(list(user.home.glob('command-*')))}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output if stderr is None else stderr,
                cwd=user.work,
                env=user.environment(),
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = COMMAND_DEADLINE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {timeout_s:.0f} s: $ {self.command}\n{self.text()}") from None

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = COMMAND_DEADLINE_S) -> None:
        """Wait for something to happen while the command runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            alive = self.process.poll() is None
            assert alive and time.monotonic() < deadline, f"{what} did not happen: $ {self.command}\n{self.text()}"
            time.sleep(LOOK_INTERVAL_S)

    def until_printed(self, pattern: str, timeout_s: float = COMMAND_DEADLINE_S) -> re.Match[str]:
        self.until(lambda: re.search(pattern, self.text()), f"output like {pattern!r}", timeout_s)
        found = re.search(pattern, self.text())
        assert found
        return found

    def interrupt(self) -> None:
        """Press Ctrl-C: send SIGINT to every foreground process."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
