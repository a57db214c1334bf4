"""The state folders of `flyball run` on this machine, one per job.

Each has a record of the command, a lock that the command holds while it lives, and the data for resuming.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ckpt_engine.rules.memory_plan import readable_size
from ckpt_engine.settings import load_settings
from flyball.cli.reach.places import host_elsewhere, live_record, make_state_dir, state_root
from flyball.cli.show.messages import announce
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.on_host.os_text import from_text, to_text
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE, shm_prefix
from flyball.contracts.wire import MALFORMED, decoder_of
from flyball.state_folder import try_lock, write_private

RECORD: Final = "run.json"
LOCK: Final = "run.lock"
CHECKPOINTS: Final = "checkpoints"  # the default disk tier
FOLDERS_KEPT: Final = 20
CHECKPOINTS_KEPT_S: Final = 14 * 86_400.0  # of jobs that nobody resumed
_SHORT_NAME: Final = 24  # of a job in its folder's name, because paths of sockets inside must be short
MOST_SURPLUS: Final = 10  # folders beyond those kept that one start looks into
MOST_AT_ONCE: Final = 64
TURN: Final = "jobs.lock"
TURN_TIMEOUT_S: Final = 10.0
TURN_LOOK_S: Final = 0.01


class RunRecord(msgspec.Struct, frozen=True):
    """run.json"""

    job: str
    arguments: tuple[str, ...]  # of `flyball run`
    workdir: str
    script: str
    world_size: int
    host_id: str
    started_at: float
    state: str = "running"  # if the command is gone and this still says "running", it was killed
    ended_at: float = 0.0
    state_dir: str = ""  # as given by the user


@dataclass
class RunFolder:
    """A job's folder, locked by this process."""

    path: Path
    job: str
    before: RunRecord | None  # of the previous command
    _lock: int

    @property
    def host(self) -> Path:
        return self.path / "host"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def write(self, record: RunRecord) -> None:
        write_private(self.path / RECORD, msgspec.json.encode(_mapped(record, to_text)))

    def close(self) -> None:
        os.close(self._lock)


def claim_folder(job: str, environ: Mapping[str, str], *, state_dir: str = "") -> RunFolder:
    """Lock and return the job's folder. While another command runs a job of that name, use the next free name: NAME-2.

    Raises Conflict if no name is free, or if the folder that the user named is in use.
    """
    if state_dir:
        path = make_state_dir(Path(state_dir))
        lock = try_lock(path / LOCK)
        if lock is None:
            raise Conflict(
                f"Another `flyball run` is using the state folder {path}.", hint="wait for its end, or use another one"
            )
        return RunFolder(path, job, read_record(path), lock)
    with _turn(state_root(environ)) as is_ours:
        for number in range(1, MOST_AT_ONCE + 1):
            name = job if number == 1 else f"{job[:59]}-{number}"
            path = make_state_dir(state_root(environ) / "jobs" / folder_name(name))
            lock = try_lock(path / LOCK)
            if lock is not None:
                if number > 1:
                    announce(f"job {job} is already running; this is another one, {name}")
                if is_ours:
                    _tidy_up(path.parent, path, environ)
                return RunFolder(path, name, read_record(path), lock)
    raise Conflict(f"Job {job} is already running {MOST_AT_ONCE} times.", hint="give this one a name with --job NAME")


def folder_name(job: str) -> str:
    """A short folder name, unique to the job."""
    if len(job) <= _SHORT_NAME + 7:
        return job
    return f"{job[:_SHORT_NAME]}-{hashlib.sha256(job.encode()).hexdigest()[:6]}"


def read_record(folder: Path) -> RunRecord | None:
    """The folder's record; None if missing or unreadable."""
    try:
        return _mapped(decoder_of(RunRecord).decode((folder / RECORD).read_bytes()), from_text)
    except (OSError, *MALFORMED):
        return None


def _mapped(record: RunRecord, change: Callable[[str], str]) -> RunRecord:
    """With its paths and arguments changed."""
    return msgspec.structs.replace(
        record,
        arguments=tuple(map(change, record.arguments)),
        workdir=change(record.workdir),
        script=change(record.script),
        state_dir=change(record.state_dir),
    )


def find_run(job: str, environ: Mapping[str, str], *, state_dir: str = "") -> RunRecord:
    """The record of the job's earlier run or, without a job, of the newest run that did not succeed.

    Raises NotFound, or Conflict if it is running.
    """
    jobs = state_root(environ) / "jobs"
    folders = [Path(state_dir)] if state_dir else sorted(jobs.iterdir()) if jobs.is_dir() else []
    with _turn(state_root(environ)):
        return _find_run(job, folders)


def _find_run(job: str, folders: Sequence[Path]) -> RunRecord:
    known = [(record, folder) for folder in folders if (record := read_record(folder)) is not None]
    known.sort(key=lambda found: found[0].started_at, reverse=True)
    names = ", ".join(record.job for record, _ in known)
    if job:
        wanted = [found for found in known if found[0].job == job]
    else:
        wanted = [found for found in known if found[0].state != "succeeded" and not _is_running(found[1])]
    if not wanted:
        raise NotFound(
            f"There is no earlier run of job {job} on this machine."
            if job
            else "There is no run on this machine that could be resumed.",
            hint=f"known jobs: {names}" if names else "start one: flyball run train.py",
        )
    record, folder = wanted[0]
    if _is_running(folder):
        raise Conflict(
            f"Job {record.job} is still running in {folder}.",
            hint=f"stop it with `flyball stop {record.job}`, or wait for its end",
        )
    return record


def segments_prefix(folder: Path, environ: Mapping[str, str]) -> str:
    """The prefix of the shared memory of the host whose state is in `folder`."""
    return shm_prefix(str((folder / "host").resolve()), environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR)


def remove_segments(folder: Path, environ: Mapping[str, str]) -> None:
    """Free the shared memory that a finished run left behind."""
    prefix = Path(segments_prefix(folder, environ))
    for segment in prefix.parent.glob(f"{prefix.name}.*"):
        segment.unlink(missing_ok=True)


def _holds_memory(folder: Path, environ: Mapping[str, str]) -> bool:
    """Whether a run left steps in shared memory. A beacon or a control segment alone does not count."""
    return holds_memory(segments_prefix(folder, environ))


def holds_memory(prefix: str) -> bool:
    """Whether there are steps in shared memory under this prefix."""
    if not any(Path(prefix).parent.glob(f"{Path(prefix).name}.*")):
        return False
    from ckpt_engine.slots.reclaim import list_memory  # slow to import, and rarely needed

    return any(memory.size_bytes for memory in list_memory(prefix))


def _reclaim(folder: Path, environ: Mapping[str, str]) -> None:
    from ckpt_engine.slots.reclaim import Reclaimer

    ttl_s = load_settings(environ).segment_ttl_s
    freed = Reclaimer(segments_prefix(folder, environ), known_jobs=tuple, ttl_s=ttl_s).sweep()
    if freed:
        size = readable_size(sum(memory.size_bytes for memory in freed))
        announce(f"freed {size} of memory: the newest steps of job {freed[0].job}, unused for {ttl_s:.0f} s")


@contextmanager
def _turn(root: Path) -> Iterator[bool]:
    """Let one command at a time check which folders are in use. Yields False if the turn did not come in time.

    The check locks a folder for a moment. Without turns, another command would take its own job for running, and start
    it under another name.
    """
    path = make_state_dir(root) / TURN
    deadline_s = time.monotonic() + TURN_TIMEOUT_S
    lock = try_lock(path)
    while lock is None and time.monotonic() < deadline_s:
        time.sleep(TURN_LOOK_S)
        lock = try_lock(path)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _is_running(folder: Path) -> bool:
    if not (folder / LOCK).exists():
        return False
    lock = try_lock(folder / LOCK)
    if lock is not None:
        os.close(lock)
    return lock is None


def _tidy_up(jobs: Path, mine: Path, environ: Mapping[str, str]) -> None:
    """Remove what other runs left behind and nobody resumed. Announces whatever could have been resumed.

    Looks into folders only where there may be something to do: a thousand runs must not delay the next one.
    """
    now = SystemClock().wall_s()
    changed_at = {Path(entry.path): entry.stat().st_mtime for entry in os.scandir(jobs) if entry.is_dir()}
    changed_at.pop(mine, None)
    folders = sorted(changed_at, key=lambda folder: changed_at[folder], reverse=True)
    surplus = folders[FOLDERS_KEPT:]
    due = [*surplus[:MOST_SURPLUS], *(f for f in surplus[MOST_SURPLUS:] if now - changed_at[f] >= CHECKPOINTS_KEPT_S)]
    for folder in _with_segments(jobs, folders, environ):
        if _is_over(folder):
            if _holds_memory(folder, environ):
                _reclaim(folder, environ)
            if not _holds_memory(folder, environ):
                remove_segments(folder, environ)
    for folder in due:
        if not _is_over(folder) or _holds_memory(folder, environ):
            continue
        if any((folder / CHECKPOINTS).rglob("*.manifest")):
            if now - changed_at[folder] < CHECKPOINTS_KEPT_S:
                continue
            announce(f"removed {folder}: checkpoints of a job that nobody has resumed for two weeks")
        shutil.rmtree(folder, ignore_errors=True)


def _is_over(folder: Path) -> bool:
    supervisor = folder / "supervisor"
    return not _is_running(folder) and live_record(supervisor) is None and not host_elsewhere(supervisor)


def _with_segments(jobs: Path, folders: Sequence[Path], environ: Mapping[str, str]) -> list[Path]:
    """The folders whose hosts have shared memory."""
    shared = Path(environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR)
    there = {path.name.partition(".")[0] for path in shared.iterdir()} if shared.is_dir() else set()
    real = jobs.resolve()  # a folder's own name is no link: it was made here
    return [f for f in folders if Path(shm_prefix(str(real / f.name / "host"), str(shared))).name in there]
