"""The runs of `flyball run` on this machine. Each job has a folder: a record of what was asked for, a lock that its
command holds while it lives, and what a later command goes on from."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ckpt_engine.settings import load_settings
from ckpt_engine.slots.memory_plan import readable_size
from flyball.cli.reach.places import live_record, make_state_dir, state_root
from flyball.cli.show.messages import announce
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE, shm_prefix
from flyball.contracts.wire import MALFORMED, decoder_of
from flyball.state_folder import try_lock, write_private

RECORD: Final = "run.json"
LOCK: Final = "run.lock"
CHECKPOINTS: Final = "checkpoints"  # the default disk tier
FOLDERS_KEPT: Final = 20
CHECKPOINTS_KEPT_S: Final = 14 * 86_400.0  # of jobs that nobody went on with
_SHORT_NAME: Final = 24  # of a job in its folder's name: sockets live inside, whose paths are short
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
    state: str = "running"  # while nothing else is known: killed, if its command lives no more
    ended_at: float = 0.0
    state_dir: str = ""  # as it was given


@dataclass
class RunFolder:
    """A job's folder, locked by this process."""

    path: Path
    job: str
    before: RunRecord | None  # of the command before this one
    _lock: int

    @property
    def host(self) -> Path:
        return self.path / "host"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def write(self, record: RunRecord) -> None:
        write_private(self.path / RECORD, msgspec.json.encode(record))

    def close(self) -> None:
        os.close(self._lock)


def take(job: str, environ: Mapping[str, str], *, state_dir: str = "") -> RunFolder:
    """The job's folder. While another command runs a job of that name, the next free one: NAME-2, ... Raises Conflict
    if that cannot be, or if the folder that was named is in use."""
    if state_dir:
        path = make_state_dir(Path(state_dir))
        lock = try_lock(path / LOCK)
        if lock is None:
            raise Conflict(
                f"Another `flyball run` uses the state folder {path}.", hint="wait for its end, or name another folder"
            )
        return RunFolder(path, job, read_record(path), lock)
    with _turn(state_root(environ)) as is_ours:
        for number in range(1, MOST_AT_ONCE + 1):
            name = job if number == 1 else f"{job[:59]}-{number}"
            path = make_state_dir(state_root(environ) / "jobs" / folder_name(name))
            lock = try_lock(path / LOCK)
            if lock is not None:
                if number > 1:
                    announce(f"job {job} is running already; this is another one, {name}")
                if is_ours:
                    _tidy_up(path.parent, path, environ)
                return RunFolder(path, name, read_record(path), lock)
    raise Conflict(f"Job {job} is running {MOST_AT_ONCE} times.", hint="give this one a name with --job NAME")


def folder_name(job: str) -> str:
    """A short one, that no other job has."""
    if len(job) <= _SHORT_NAME + 7:
        return job
    return f"{job[:_SHORT_NAME]}-{hashlib.sha256(job.encode()).hexdigest()[:6]}"


def read_record(folder: Path) -> RunRecord | None:
    """None if there is none, or none that can be read."""
    try:
        return decoder_of(RunRecord).decode((folder / RECORD).read_bytes())
    except (OSError, *MALFORMED):
        return None


def find_run(job: str, environ: Mapping[str, str], *, state_dir: str = "") -> RunRecord:
    """The record of an earlier run: of this job, or of the newest that did not succeed. Raises NotFound, and Conflict
    if it is running."""
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
            hint=f"known are {names}" if names else "start one: flyball run train.py",
        )
    record, folder = wanted[0]
    if _is_running(folder):
        raise Conflict(f"Job {record.job} is still running.", hint=f"stop it first, or wait: {folder}")
    return record


def segments_prefix(folder: Path, environ: Mapping[str, str]) -> str:
    """Of the shared memory of the host whose state is in `folder`."""
    return shm_prefix(str((folder / "host").resolve()), environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR)


def remove_segments(folder: Path, environ: Mapping[str, str]) -> None:
    """Free what a run that is over left in shared memory."""
    prefix = Path(segments_prefix(folder, environ))
    for segment in prefix.parent.glob(f"{prefix.name}.*"):
        segment.unlink(missing_ok=True)


def _holds_memory(folder: Path, environ: Mapping[str, str]) -> bool:
    """Whether a run left steps in shared memory: a beacon, or a control segment alone, is none."""
    return holds_memory(segments_prefix(folder, environ))


def holds_memory(prefix: str) -> bool:
    """Whether there are steps in shared memory under this prefix."""
    if not any(Path(prefix).parent.glob(f"{Path(prefix).name}.*")):
        return False
    from ckpt_engine.slots.reclaim import list_memory  # only if there is anything

    return any(memory.size_bytes for memory in list_memory(prefix))


def _reclaim(folder: Path, environ: Mapping[str, str]) -> None:
    from ckpt_engine.slots.reclaim import Reclaimer

    ttl_s = load_settings(environ).segment_ttl_s
    freed = Reclaimer(segments_prefix(folder, environ), known_jobs=tuple, ttl_s=ttl_s).sweep()
    if freed:
        size = readable_size(sum(memory.size_bytes for memory in freed))
        announce(f"freed {size} of memory: the newest steps of job {freed[0].job}, which nobody used for {ttl_s:.0f} s")


@contextmanager
def _turn(root: Path) -> Iterator[bool]:
    """One command at a time looks which folders are in use, which takes their locks for a moment: else another one
    would find its own job "running already", and begin it anew under another name. False: the turn did not come."""
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
    """Give back what other runs left and nobody came back for. Nothing that could be gone on from goes unsaid."""
    folders = [folder for folder in jobs.iterdir() if folder.is_dir() and folder != mine and not _is_running(folder)]
    folders = [folder for folder in folders if live_record(folder / "supervisor") is None]
    folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders:
        if _holds_memory(folder, environ):
            _reclaim(folder, environ)
        if not _holds_memory(folder, environ):
            remove_segments(folder, environ)
    for folder in folders[FOLDERS_KEPT:]:
        if _holds_memory(folder, environ):
            continue
        if any((folder / CHECKPOINTS).rglob("*.manifest")):
            if SystemClock().wall_s() - folder.stat().st_mtime < CHECKPOINTS_KEPT_S:
                continue
            announce(f"removed {folder}: the checkpoints of a job that nobody went on with for two weeks")
        shutil.rmtree(folder, ignore_errors=True)
