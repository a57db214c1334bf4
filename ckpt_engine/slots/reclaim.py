"""Give back the memory of segments that nobody needs any more: of jobs that died without being recorded as ended, and
unfinished files of dead makers.

A rank's segments are removed only if the engine does not know the job, no process has them open (each user holds a
shared flock on the control segment, which the kernel releases even at a kill -9), and nobody has used them for the time
to live. This happens under the exclusive lock, so that whoever opens them meanwhile makes new ones.
"""

from __future__ import annotations

import fcntl
import os
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from ckpt_engine.counters import Counters
from ckpt_engine.slots import restore_folders, segment_files
from ckpt_engine.slots.control_file import boot_time_ns, other_layout, read_last_use, write_last_use
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.errors import Conflict, FlyballError
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, SLOT_SUFFIXES, SegmentName, parse_segment

log = structlog.get_logger()

_MOST_S, _LEAST_S = 60.0, 0.05  # between two sweeps


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's segments on this host, found by their names."""

    job: str
    replica: bool
    rank: int
    size_bytes: int  # of its slots


def list_memory(prefix: str) -> list[RankMemory]:
    """The segments under the prefix, by job, kind and rank."""
    sizes: dict[tuple[str, bool, int], int] = defaultdict(int)
    for name, path in _files(prefix):
        try:
            size_bytes = path.lstat().st_size if name.suffix in SLOT_SUFFIXES else 0  # others make links here
        except FileNotFoundError:  # removed since it was listed
            continue
        if not name.maker_pid:
            sizes[name.job, name.replica, name.rank] += size_bytes
    return [RankMemory(*key, size_bytes) for key, size_bytes in sorted(sizes.items())]


def remove_job(prefix: str, job: str) -> list[RankMemory]:
    """Remove a job's segments on request, also those of another release. Raises Conflict if a process uses some; those
    of other ranks are removed then."""
    removed: list[RankMemory] = []
    in_use: list[RankMemory] = []
    for memory in list_memory(prefix):
        if memory.job == job:
            gone = _remove(prefix, memory, known_jobs=tuple, ttl_s=None)
            (removed if gone else in_use).append(memory)
    if in_use:
        ranks = ", ".join(f"{'replica of ' if memory.replica else ''}rank {memory.rank}" for memory in in_use)
        raise Conflict(
            f"The slots of {job} are in use: {ranks}.",
            hint="end the job first; its trainers and the host's engine have them open",
        )
    restore_folders.remove_of_job(prefix, job)
    return removed


def _remove(prefix: str, memory: RankMemory, *, known_jobs: Callable[[], Collection[str]], ttl_s: float | None) -> bool:
    """Remove a rank's segments unless somebody uses them, or, with `ttl_s`, has used them since. False if they stay."""
    base = SegmentName(memory.job, memory.replica, memory.rank, "").base(prefix)
    control = base + CONTROL_SUFFIX
    try:
        descriptor = segment_files.open_private(control)
    except FileNotFoundError:
        if not any(Path(base + suffix).exists() for suffix in SLOT_SUFFIXES):
            return False  # removed since they were listed
        # Slots without a control segment: nobody can open them. A new one starts their time to live, and its lock
        # protects the slots of a trainer that starts right now.
        RankSegments.open(base, create=True).close()
        descriptor = segment_files.open_private(control)
    try:
        last_use_ns = read_last_use(descriptor)
        if ttl_s is not None and last_use_ns is None:
            raise other_layout(control)
        in_use = not segment_files.try_lock(descriptor, control, fcntl.LOCK_EX)
        now_ns = boot_time_ns()
        if last_use_ns is not None and (in_use or last_use_ns > now_ns):
            write_last_use(descriptor, now_ns)  # in use until now, or from before a reboot
        if in_use:
            return False
        if ttl_s is not None and not is_reclaimable(
            known=memory.job in known_jobs(), in_use=in_use, unused_s=unused_s(last_use_ns or 0, now_ns), ttl_s=ttl_s
        ):
            return False
        for suffix in (*SLOT_SUFFIXES, CONTROL_SUFFIX):  # the control segment last, with the lock on it
            segment_files.remove(base + suffix)
        return True
    finally:
        os.close(descriptor)


def _files(prefix: str) -> list[tuple[SegmentName, Path]]:
    folder = Path(prefix).parent
    names = ((parse_segment(prefix, path.name), path) for path in folder.iterdir())
    return [(name, path) for name, path in names if name is not None]


class Reclaimer:
    """Sweeps periodically, in a thread of its own."""

    def __init__(
        self,
        prefix: str,
        *,
        known_jobs: Callable[[], Collection[str]],
        ttl_s: float,
        counters: Counters | None = None,
    ) -> None:
        self._prefix = prefix
        self._known_jobs = known_jobs
        self._ttl_s = ttl_s
        self._logged: set[str] = set()  # reasons why segments stay
        self._interval_s = max(_LEAST_S, min(_MOST_S, ttl_s / 4))
        self._thread = WorkerThread("reclaim", self._sweep_now, counters=counters, retry_s=self._interval_s)

    def start(self) -> None:
        """Call once the jobs of a previous engine process are known again."""
        self._thread.start()

    def close(self) -> None:
        """Begin no further sweep."""
        self._thread.stop()

    def sweep(self) -> list[RankMemory]:
        """Remove what nobody needs, and return it. Segments of another layout or another user are logged, and stay."""
        for name, path in _files(self._prefix):
            if name.maker_pid:
                segment_files.remove_unfinished(str(path), name.maker_pid)
        for job, folder in restore_folders.left(self._prefix):
            if job not in self._known_jobs():
                restore_folders.remove(folder)
                log.info("restore_folder_reclaimed", job=job, folder=folder.name)
        removed: list[RankMemory] = []
        for memory in list_memory(self._prefix):
            if memory.job in self._known_jobs():
                continue
            try:
                gone = _remove(self._prefix, memory, known_jobs=self._known_jobs, ttl_s=self._ttl_s)
            except (FlyballError, OSError) as error:
                self._log_once(str(error), memory)
                continue
            if gone:
                removed.append(memory)
                log.info("segments_reclaimed", **asdict(memory))
        return removed

    def _log_once(self, reason: str, memory: RankMemory) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("segments_not_reclaimed", **asdict(memory), reason=reason)

    def _sweep_now(self) -> float:
        try:
            self.sweep()
        except OSError as error:  # the folder is gone, or not readable
            log.warning("segments_not_swept", reason=str(error))
        return self._interval_s


# --- the rule ---


def unused_s(last_use_ns: int, now_ns: int) -> float:
    """Seconds since the last use, both in boot time. Zero if the last use is in the future: it dates from before a
    reboot, in a folder that survived it, so the time to live begins again."""
    return max(0, now_ns - last_use_ns) / 1e9


def is_reclaimable(*, known: bool, in_use: bool, unused_s: float, ttl_s: float) -> bool:
    """Whether segments can go: unknown to the engine, open in no process, unused for longer than the time to live."""
    return not known and not in_use and unused_s > ttl_s
