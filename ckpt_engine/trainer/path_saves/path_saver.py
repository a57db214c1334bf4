"""`flyball.save`: capture into shared memory, then write to the disk in the background.

One saver per process. Its thread writes one path after the other, and its exit waits for them.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.format.sealed_file import PlaceholderContent, encode_placeholder
from ckpt_engine.path_saves.finish import PathChanged, finish, sweep
from ckpt_engine.path_saves.path_memory import PathMemory, memories, memory_root, remove_memory
from ckpt_engine.path_saves.pending_mark import mark_of, put_mark, remove_mark
from ckpt_engine.path_saves.save_notes import FileIdentity, SaveNote, identity_of
from ckpt_engine.rules.memory_plan import MemoryPlan, readable_size
from ckpt_engine.settings import load_settings
from ckpt_engine.slots.rank_segments import SegmentOptions
from ckpt_engine.trainer.capture.capturer import Capture, Capturer
from ckpt_engine.trainer.path_saves.direct_write import write_directly
from ckpt_engine.trainer.path_saves.pending_paths import PendingPaths
from ckpt_engine.trainer.path_saves.plain_state import enclose
from ckpt_engine.worker_thread import WorkerThread, describe_failure
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    Conflict,
    FlyballError,
    MemoryTooSmall,
    UsageError,
)
from flyball.contracts.identity import is_name
from flyball.contracts.on_host import worker_env
from flyball.state_folder import clear_errors

_log = logging.getLogger("flyball.engine")

KEPT_PATHS = 2  # of which the newest saves stay in memory, beside those that are not yet on the disk
EXIT_WAIT_S = 600.0  # for the disk; what is not there by then stays in memory
_IDLE_S = 3600.0
_RETRY_S = 1.0
_ATTEMPTS = 3  # to write a save, before its failure is reported


class PathSave:
    """What `flyball.save` returns. You may ignore it."""

    def __init__(self, path: str, step: int, pending: PendingPaths) -> None:
        self.path = path
        self.error = ""
        """Why this save is not on the disk, or '' if it is, or is not yet. It is in memory all the same."""
        self.step = step
        """The number of this save of its path, -1 if it was written to the disk at once."""
        self._pending = pending

    def wait(self, timeout_s: float = EXIT_WAIT_S) -> bool:
        """Wait until the save, or a newer one of the path, is on the disk. False if time runs out, or it failed."""
        return self._pending.wait(self.path, self.step, timeout_s) and not self.error


@dataclass(slots=True)
class _OpenPath:
    """A path that this process saves to."""

    memory: PathMemory
    capturer: Capturer
    unwritten: deque[PathSave] = field(default_factory=deque)
    failure: FlyballError | None = None  # of the newest write, until it is raised


@dataclass(slots=True)
class PathSaver:
    """All paths that this process saves to."""

    pending: PendingPaths = field(default_factory=PendingPaths)
    _root: Path = field(default_factory=lambda: memory_root(os.environ))
    _paths: OrderedDict[str, _OpenPath] = field(default_factory=OrderedDict)  # the newest last
    _saving: threading.RLock = field(default_factory=threading.RLock)
    _thread: WorkerThread | None = None
    _swept: bool = False
    _said_direct: bool = False
    _pid: int = field(default_factory=os.getpid)

    # --- saving ---

    def save(self, obj: object, path: str | os.PathLike[str]) -> PathSave:
        """See `flyball.save`."""
        real = _checked_path(path)
        state = enclose(obj)
        with self._saving:
            handle = self._captured(real, state) or self._written_directly(real, state)
            opened = self._paths.get(real)
            failure = None if opened is None else opened.failure
            if opened is not None:
                opened.failure = None
        if failure is not None:
            raise failure
        return handle

    def _captured(self, real: str, state: dict[str, object]) -> PathSave | None:
        """None if there is no memory for it."""
        for attempt in range(_ATTEMPTS):
            opened = self._opened(real)
            try:
                return self._capture(opened, real, state, keep=0 if attempt else KEPT_PATHS - 1)
            except MemoryTooSmall as error:
                if attempt:
                    self._say_direct(error)
                    return None
                self.pending.wait_all(EXIT_WAIT_S)  # then their memory can be freed
            except Conflict:
                if opened.memory.is_current or attempt + 1 == _ATTEMPTS:
                    raise
        return None

    def _opened(self, real: str) -> _OpenPath:
        opened = self._paths.get(real)
        if opened is None or not opened.memory.is_current:
            self._forget(real)
            self._start()
            settings = load_settings(os.environ)
            memory = PathMemory.create(self._root, real, SegmentOptions.of(settings))
            opened = self._paths[real] = _OpenPath(memory, Capturer(sealed=True))
        self._paths.move_to_end(real)
        return opened

    def _capture(self, opened: _OpenPath, real: str, state: dict[str, object], *, keep: int) -> PathSave:
        memory, segments = opened.memory, opened.memory.segments
        capture = opened.capturer.take(state)
        with memory.saving():
            index, step = memory.slot_to_write()
            plan = MemoryPlan(capture.payload_bytes)
            self._make_room(opened, index, plan, keep)
            payload = segments.begin_write(index, 0, step, capture.payload_bytes, plan)
            try:
                _copy(opened.capturer, capture, index, payload)
                note = self._note(memory, real, step, capture.plan.seal_bytes)
                memory.note_save(note)
            except BaseException:
                segments.drop(index)
                raise
            segments.mark_captured(index)
        handle = PathSave(real, step, self.pending)
        self.pending.add(real, step)  # before the thread can settle it
        opened.unwritten.append(handle)
        if self._thread is not None:
            self._thread.wake()
        return handle

    def _note(self, memory: PathMemory, real: str, step: int, seal_bytes: int) -> SaveNote:
        replaces = identity_of(real) or _put_placeholder(real, memory.folder.name, step)
        try:
            put_mark(real, mark_of(self._root, step, replaces))
        except OSError as error:  # a full disk: the save is in memory all the same
            _log.warning("other containers may load an older %s meanwhile: %s", real, error)
        job = os.environ.get(worker_env.JOB, "")
        return SaveNote(
            step=step,
            replaces=replaces,
            seal_bytes=seal_bytes,
            saved_at=SystemClock().wall_s(),
            pid=os.getpid(),
            job=job if is_name(job) else "standalone",
            run=os.environ.get(worker_env.RUN, ""),
        )

    # --- memory ---

    def _make_room(self, opened: _OpenPath, index: int, plan: MemoryPlan, keep: int) -> None:
        """Before a slot is made: free the memory of all paths but the newest `keep`, and take over a slot of one of
        them. Raises MemoryTooSmall if the others leave no room within the limit."""
        memory, size_bytes = opened.memory, plan.payload_bytes
        if memory.has_slot(index, size_bytes):
            return
        others = sorted((m for m in memories(self._root) if m.folder != memory.folder), key=lambda m: m.unused_s)
        kept_bytes = 0
        for place, other in enumerate(others):
            with other.removing() as may_remove:
                if may_remove and place >= keep:
                    if not memory.has_slot(index, size_bytes):
                        other.give_to(memory, index, size_bytes)
                    other.remove()
                    self._forget(other.path)
                else:
                    kept_bytes += other.size_bytes
                    other.close()
        limit_bytes = load_settings(os.environ).memory_limit_bytes
        if limit_bytes and kept_bytes + plan.total_bytes > limit_bytes:
            raise MemoryTooSmall(
                f"A save of {memory.path} needs {readable_size(plan.total_bytes)} of memory beside "
                f"{readable_size(kept_bytes)} of other paths, and the limit is {readable_size(limit_bytes)}.",
                hint="raise FLYBALL_CKPT_MEMORY_LIMIT_BYTES",
            )

    def _forget(self, path: str) -> None:
        forgotten = self._paths.pop(path, None)
        if forgotten is not None:
            forgotten.capturer.close()
            forgotten.memory.close()

    def _written_directly(self, real: str, state: dict[str, object]) -> PathSave:
        """Without room in memory: write to the disk while the caller waits. Raises StorageFull, OSError."""
        write_directly(state, Path(real))
        self._forget(real)
        remove_memory(self._root, real)  # it is older, and no longer counts
        remove_mark(real, self._root, sys.maxsize)
        return PathSave(real, -1, self.pending)

    def _say_direct(self, reason: MemoryTooSmall) -> None:
        if not self._said_direct:
            self._said_direct = True
            _log.warning("flyball.save writes to the disk before it returns: %s", reason)

    # --- the background ---

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive:
            if self._thread is None:
                self.pending.watch(EXIT_WAIT_S)
                atexit.register(self.finish_at_exit)
                multiprocessing.util.Finalize(None, self.finish_at_exit, exitpriority=0)  # its children have no atexit
                os.register_at_fork(after_in_child=_forget_saver)
            self._thread = WorkerThread("flyball-save", self._write_next, retry_s=_RETRY_S)
            self._thread.start()

    def _write_next(self) -> float:
        self.pending.exempt_this_thread()
        if not self._swept:
            self._swept = True
            for left in sweep(self._root, ttl_s=load_settings(os.environ).segment_ttl_s):
                _log.info("found in memory: %s: %s %s", left.path, left.state, left.reason)
        for path, opened in list(self._paths.items()):
            if opened.unwritten:
                self._write(path, opened, opened.unwritten[-1].step)
        return 0.0 if len(self.pending) else _IDLE_S

    def _write(self, path: str, opened: _OpenPath, step: int) -> None:
        error = ""
        for attempt in range(_ATTEMPTS):
            try:
                finish(opened.memory)
                break
            except PathChanged as changed:
                error = changed.message
                _log.warning("%s", error)
                break
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is reported, and training goes on
                if attempt + 1 < _ATTEMPTS:
                    time.sleep(_RETRY_S * attempt)
                    continue
                error = describe_failure(failure)
                opened.failure = failure if isinstance(failure, FlyballError) else _failed(path, failure)
                sys.stderr.write(f"flyball: {path} is in memory, and could not be written: {error}\n")
        while opened.unwritten and opened.unwritten[0].step <= step:
            opened.unwritten.popleft().error = error
        self.pending.settle(path, step)

    def finish_at_exit(self) -> None:
        """Wait until everything is on the disk, then free the memory, unless the process ends by an exception: then
        the next one loads from memory."""
        if self._pid != os.getpid():
            return
        if not self.pending.wait_all(EXIT_WAIT_S):
            sys.stderr.write("flyball: saves are still in memory only; `flyball ckpt finish` writes them\n")
        if self._thread is not None:
            self._thread.stop()
            self._thread.join(_RETRY_S)
        while self._paths:
            _, opened = self._paths.popitem()
            opened.capturer.close()
            with opened.memory.removing() as may_remove:
                if may_remove and getattr(sys, "last_type", None) is None:
                    opened.memory.remove()
                else:
                    opened.memory.close()


def _copy(capturer: Capturer, capture: Capture, index: int, payload: memoryview) -> None:
    """Copy everything. Raises CheckpointError if that fails."""
    errors: list[str] = []
    capturer.copy(capture, index, payload, errors.append)
    capturer.wait()
    if errors != [""]:
        raise CheckpointError(f"The state could not be copied: {' '.join(errors)}.")


def _checked_path(path: str | os.PathLike[str]) -> str:
    """The path with links resolved. Raises UsageError, ConfigurationError."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"flyball.save writes to a path, not to a {type(path).__name__}.",
            hint="pass the file's path; for an open file or a buffer use torch.save",
        )
    real = os.path.realpath(os.fsdecode(path))
    folder = Path(real).parent
    if not folder.is_dir():
        raise ConfigurationError(f"There is no folder {folder}.", hint="create it before you save")
    if Path(real).is_dir() or (Path(real).exists() and not Path(real).is_file()):
        raise ConfigurationError(f"{real} is not a regular file.", hint="save to another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{folder} is not writable.", hint="save to another folder")
    return real


def _put_placeholder(real: str, memory: str, step: int) -> FileIdentity:
    """A file at a path without one, so that it can be seen. Raises StorageFull, ConfigurationError."""
    data = encode_placeholder(PlaceholderContent(memory, step))
    with clear_errors(Path(real), hint="save to a folder that you may write to"):
        descriptor = os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.write(descriptor, data)
            return FileIdentity.of(os.fstat(descriptor))
        except OSError:
            Path(real).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    raise AssertionError  # `clear_errors` lets no error pass


def _failed(path: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} could not be written: {error}.", hint="see the disk, then save again")


_saver: PathSaver | None = None
_making = threading.Lock()


def process_saver() -> PathSaver:
    """This process's saver."""
    global _saver  # noqa: PLW0603 - one per process, like its exit
    with _making:
        if _saver is None:
            _saver = PathSaver()
        return _saver


def _forget_saver() -> None:
    """A forked child has no thread that writes, and none of these saves."""
    global _saver  # noqa: PLW0603
    _saver = None
