"""Run a host daemon as a child process, and end everything that belongs to it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import psutil

from flyball.contracts.errors import FlyballError, Unreachable
from flyball.contracts.on_host.engine_wire import ENGINE_PID_FILE
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE, shm_prefix
from flyball.process_title import read_words
from host_daemon.kernel.kin import WorkerOrigin, kin_of

DAEMON_STOP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 5.0
KILL_ROUNDS = 3
READ_TIMEOUT_S = 1.0
LOOK_INTERVAL_S = 0.02


class HostProcess:
    """Starts one host daemon and ends it with its engine, spawner, workers and shared memory."""

    def __init__(
        self,
        *,
        host_id: str,
        state_dir: Path,
        supervisor_url: str,
        token_file: Path,
        address: str = "127.0.0.1",
        failure_domain: str = "",
        report_interval_s: float = 1.0,
        warm_nproc: int = 0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.host_id = host_id
        self.state_dir = state_dir
        self.log_file = state_dir.parent / f"{state_dir.name}.daemon.out"
        self._arguments = [
            *("--state-dir", str(state_dir), "--host-id", host_id, "--supervisor", supervisor_url),
            *("--token-file", str(token_file), "--address", address, "--report-interval-s", str(report_interval_s)),
            *("--warm-nproc", str(warm_nproc)),
            *(("--failure-domain", failure_domain) if failure_domain else ()),
        ]
        self._environ = dict(os.environ if environ is None else environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._prefix = ""
        self.keeps_segments = False  # leave shared memory in place, so that a later run can resume from it

    def start(self) -> None:
        """Start the daemon in its own session, so that Ctrl-C reaches only this command, which ends it in order."""
        self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._prefix = shm_prefix(str(self.state_dir.resolve()), self._environ.get(SHM_DIR_VARIABLE, DEFAULT_SHM_DIR))
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flyball.cli.run.tied", str(os.getpid()), "host_daemon", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def is_warm(self) -> bool:
        """Whether the daemon has logged that its warm standby is ready."""
        return self.log_file.exists() and '"spawner_ready"' in self.log_file.read_text(errors="replace")

    def check(self) -> None:
        """Raise the daemon's error, if it has ended."""
        if self._process is None or not self.has_ended:
            return
        raise _daemon_error(self.host_id, self._process.returncode, self.log_file)

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def give_notice(self) -> None:
        """Notify the daemon that this host leaves. It ends by itself once its ranks train elsewhere or time is up."""
        if self._process is not None and not self.has_ended:
            self._process.terminate()

    def stop(self) -> None:
        """Send the daemon SIGTERM and SIGINT, then SIGKILL whatever is left of this host, and remove its segments."""
        processes = self.processes()
        if self._process and not self.has_ended:
            self._process.terminate()  # works even before the daemon handles signals
            self._process.send_signal(signal.SIGINT)  # do not wait for the ranks to move: there is no other host
            try:
                self._process.wait(DAEMON_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(KILL_TIMEOUT_S)
        _kill_all(processes, self.processes)
        if not self.keeps_segments:
            self.remove_segments()
        from host_daemon.store.command_journal import RESERVE_FILE  # with structlog: not at the start
        from host_daemon.store.reserve import Reserve

        with suppress(FlyballError):  # what cannot be read may be needed
            Reserve(self.state_dir / RESERVE_FILE).give_back()

    def kill(self, *, except_engine: bool = False) -> None:
        """Kill its processes at once, except optionally the engine, which may still have to write checkpoints."""
        spared = _engine_pid(self.state_dir) if except_engine else 0
        if self._process and self._process.poll() is None:
            self._process.kill()  # first, because it would restart its workers
            self._process.wait(KILL_TIMEOUT_S)
        end_processes(self.state_dir, spared_pid=spared)

    def processes(self) -> list[psutil.Process]:
        """All processes of this host: the daemon's descendants and, because engine and workers outlive it, those that
        it recorded, that have the state folder as an argument, or that write their output into it."""
        found: dict[int, psutil.Process] = {}
        if self._process and self._process.poll() is None:
            found |= {p.pid: p for p in _family(self._process.pid)}
        return list((found | _processes_of(self.state_dir)).values())

    @property
    def segments_prefix(self) -> str:
        """The prefix of its shared memory; '' before the start."""
        return self._prefix

    def remove_segments(self) -> None:
        """Unlink all shared memory under this host's prefix."""
        folder, name = os.path.split(self._prefix)
        if not name:
            return
        for path in Path(folder).glob(f"{name}.*"):
            path.unlink(missing_ok=True)


def is_written(logs: Path) -> bool:
    """Whether a process is writing one of the rank logs in this folder, as every worker does."""
    folder = logs.resolve()
    return any(_writes_rank_log(process, folder) for process in psutil.process_iter())


def end_processes(state_dir: Path, *, spared_pid: int = 0) -> None:
    """Send SIGKILL to every process of the host with this state folder, except `spared_pid`, until none is left."""

    def find() -> list[psutil.Process]:
        return [process for pid, process in _processes_of(state_dir).items() if pid != spared_pid]

    _kill_all(find(), find)


def _kill_all(processes: list[psutil.Process], find_again: Callable[[], list[psutil.Process]]) -> None:
    for _ in range(KILL_ROUNDS):  # a process that is not dead yet may have started another
        left = [process for process in processes if _is_alive(process)]
        if not left:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # psutil checks that the id still means the same process
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while any(map(_is_alive, left)) and time.monotonic() < deadline:
            time.sleep(LOOK_INTERVAL_S)
        processes = find_again()


def _processes_of(state_dir: Path) -> dict[int, psutil.Process]:
    found: dict[int, psutil.Process] = {}
    recorded = kin_of(_recorded_workers(state_dir / "daemon.sqlite"), {})
    for process in psutil.process_iter():
        if process.pid == os.getpid() or process.pid in found:
            continue
        if process.pid in recorded or _belongs(process, str(state_dir)):
            found |= {p.pid: p for p in _family(process.pid)}
    found.pop(os.getpid(), None)
    return found


def _engine_pid(state_dir: Path) -> int:
    try:
        return int((state_dir / ENGINE_PID_FILE).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _output_of(process: psutil.Process) -> Path:
    return Path(f"/proc/{process.pid}/fd/1").readlink()


def _writes_rank_log(process: psutil.Process, folder: Path) -> bool:
    try:
        output = _output_of(process)
    except (psutil.Error, OSError):
        return False
    return output.is_relative_to(folder) and output.match("g*/rank*.log") and _is_alive(process)


def _belongs(process: psutil.Process, state_dir: str) -> bool:
    try:
        if process.uids().real != os.getuid():
            return False
        return state_dir in read_words(process.pid) or _output_of(process).is_relative_to(state_dir)
    except (psutil.Error, OSError):
        return False


def _recorded_workers(database: Path) -> list[WorkerOrigin]:
    """The workers that a daemon recorded.

    They are needed because a worker may write its output anywhere (--log-dir), run any program (--no-python), and end
    before the processes that it started.
    """
    if not database.exists():
        return []
    try:
        with closing(
            sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True, timeout=READ_TIMEOUT_S)
        ) as connection:
            rows = connection.execute("SELECT pid, start_ticks, job, rank, generation FROM workers").fetchall()
    except sqlite3.Error:  # locked or incomplete: processes are then found by their arguments and output only
        return []
    return [WorkerOrigin(*row) for row in rows]


def _daemon_error(host_id: str, code: int, log_file: Path) -> FlyballError:
    lines = log_file.read_text(errors="replace").splitlines() if log_file.exists() else []
    message = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    hint = next((line.removeprefix("Next step: ") for line in reversed(lines) if line.startswith("Next step: ")), "")
    if message:
        error = FlyballError(message, hint=hint)
    else:
        last = f" Its last output was: {lines[-1].strip()}" if lines else ""
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        error = Unreachable(f"The host daemon of {host_id} {ended}.{last}", hint=f"read its log, {log_file}")
    if code > 0 and message:
        error.exit_code = code
    return error
