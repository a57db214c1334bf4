"""The start of each Flyball process: lean imports, its own packages first, and logging.

structlog draws tracebacks with rich, and httpx brings a command line made of click, rich and pygments. Flyball uses
neither. Together they take as long to import as the libraries themselves, in each of four processes.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

_LIBRARIES = (("structlog", ("rich", "rich.console", "rich.pretty", "rich.traceback")), ("httpx", ("httpx._main",)))
_PR_SET_PDEATHSIG = 1
MOST_LOG_BYTES = 16 << 20
OLD_LOGS_KEPT = 3


def import_lean(*libraries: str) -> None:
    """Import structlog or httpx without their extras, unless already imported. Call it before anything imports them."""
    for library, extras in _LIBRARIES:
        if library in libraries and library not in sys.modules:
            with _hidden(extras):
                importlib.import_module(library)


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause garbage collection around what makes many objects and few cycles. In imports collecting costs a tenth of
    the time; in a restore, now and then as long as the whole restore."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prefer_own_packages() -> None:
    """Put Flyball's folder first on this process's path: a user's PYTHONPATH may hold other packages named `services`
    or `goodput`. Training processes keep the user's order."""
    root = str(Path(__file__).parents[1])
    sys.path[:] = [root, *(entry for entry in sys.path if entry != root)]


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, even by SIGKILL. Linux's PR_SET_PDEATHSIG; it
    means the thread of the parent that started this process."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)


def log_to_stderr(stderr: object | None = None, *, for_people: bool = False) -> None:
    """Log to stderr, one JSON object per line or, `for_people`, a line of text; the parent process decides where that
    goes. `stderr`: a text stream in its place."""
    import logging

    import structlog

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,  # not as dicts: those show local variables, tokens among them
            _as_text if for_people else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(
            cast("TextIO", stderr or sys.stderr)
        ),  # one write per line: a kill leaves no half line
        cache_logger_on_first_use=True,
    )


def _as_text(_logger: object, level: str, event: MutableMapping[str, Any]) -> str:
    """'14:06:54 host node-7: spawner ready (pid 4711)', and the level if it is not info."""
    at, host, what = (str(event.pop(name, "")) for name in ("timestamp", "host_id", "event"))
    event.pop("level", None)
    stack = f"\n{event.pop('exception')}" if "exception" in event else ""
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in event.items())
    rank = "" if level == "info" else f"{level.upper()}: "
    line = f"{at[11:19]} host {host}: {rank}{what.replace('_', ' ')}{f' ({about})' if about else ''}{stack}"
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in line)


class RotatedStderr:
    """The stderr of a process whose parent opened a log for it: rotates that file, as others, and strangers, have a say
    in how much is logged. A text stream. One caller at a time, as structlog's loggers of one file take turns."""

    def __init__(
        self, path: Path, stderr: TextIO, *, most_bytes: int = MOST_LOG_BYTES, standard: tuple[int, ...] = (1, 2)
    ) -> None:
        """`path` is rotated once it has `most_bytes`, if `stderr` writes to it; `standard`: the descriptors that do."""
        self._path = path
        self._stderr = stderr
        self._most_bytes = most_bytes
        self._standard = standard

    def write(self, text: str) -> int:
        written = self._stderr.write(text)
        self._stderr.flush()
        try:
            self._rotate_if_large()
        except OSError:  # a full disk, or a folder that is gone: the log goes on where it is
            return written
        return written

    def flush(self) -> None:
        self._stderr.flush()

    def _rotate_if_large(self) -> None:
        number = self._stderr.fileno()
        mine = os.fstat(number)
        if mine.st_size < self._most_bytes:
            return
        named = self._path.stat()
        if (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino):
            return
        for age in range(OLD_LOGS_KEPT, 0, -1):
            older = self._aged(age - 1)
            if older.exists():
                older.replace(self._aged(age))
        new = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            for standard in self._standard:
                os.dup2(new, standard)
        finally:
            os.close(new)

    def _aged(self, age: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{age}") if age else self._path


@contextmanager
def _hidden(modules: tuple[str, ...]) -> Iterator[None]:
    """Make these modules fail to import meanwhile, as if they were not installed."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(dict.fromkeys(modules))  # type: ignore[arg-type]  # None is how the import system spells it
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
