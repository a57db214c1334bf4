"""Finds the error that ended a worker: in torch's error file, else at the end of its log. Classifies it, and keeps the
log's last lines."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import msgspec

from flyball.contracts.cluster import WorkerError
from flyball.contracts.error_classes import SECONDARY, ErrorClass, classify
from flyball.contracts.reports.signals import MAX_LOG_TAIL_CHARS
from flyball.contracts.wire import MALFORMED
from flyball.worker_files import read_worker_file, read_worker_file_from
from host_daemon.kernel.processes import ExitStatus

MAX_MESSAGE_CHARS = 4_000
MAX_TRACEBACK_CHARS = 12_000
MAX_LOG_LINES = 20
SECONDARY_LOG_LINES = 5  # many ranks may lose their connections at once, and their logs do not show why
_TAIL_BYTES = 32 << 10
MAX_ERROR_FILE_BYTES = 1 << 20  # torch's has a message and a traceback
_LONGEST_LINE = 1_000
_SIGNALS_OF_FAILURE = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

_EXCEPTION_LINE = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.MULTILINE)
_CPP_TERMINATE = re.compile(
    r"terminate called after throwing an instance of '(?P<kind>[^']+)'\s+what\(\):\s*(?P<message>.*)"
)
_TRACEBACK = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # before each line of a traceback that torch prints
_NOT_TEXT = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class WorkerEnding(msgspec.Struct, frozen=True):
    """What is known about how a worker ended."""

    error: WorkerError | None = None
    error_class: ErrorClass | str = ""
    log_tail: str = ""
    kernel: str = ""


def read_ending(error_file: Path, log_path: Path, status: ExitStatus, kernel: str = "") -> WorkerEnding:
    """Find the error, its class and the last lines of the log. `kernel`: its own line about the end, '' if none."""
    error = read_error(error_file, log_path, status)
    lines = _last_lines(log_path)
    error_class = classify(
        exit_code=status.exit_code,
        signal_number=status.signal_number,
        kind=error.kind if error else "",
        message=error.message if error else "",
        traceback=error.traceback if error else "",
        log_lines=lines,
        kernel=kernel,
    )
    kept = lines[-SECONDARY_LOG_LINES if error_class in SECONDARY else -MAX_LOG_LINES :]
    return WorkerEnding(error, error_class, "\n".join(kept)[-MAX_LOG_TAIL_CHARS:], kernel[:_LONGEST_LINE])


def read_error(error_file: Path, log_path: Path, status: ExitStatus) -> WorkerError | None:
    """None if neither has one. The log counts only if the worker failed by itself: a killed one may have printed a
    traceback that it survived."""
    if status.exit_code == 0:
        return None
    error = _from_error_file(error_file)
    by_itself = status.exit_code is not None or status.signal_number in _SIGNALS_OF_FAILURE
    return error if error is not None or not by_itself else _from_log(log_path)


def _from_error_file(path: Path) -> WorkerError | None:
    try:
        content = msgspec.json.decode(read_worker_file(path, MAX_ERROR_FILE_BYTES))
    except (OSError, *MALFORMED):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    extra: object = {}
    if isinstance(message, dict):
        message, extra = message.get("message", ""), message.get("extraInfo", {})
    if not isinstance(message, str):
        return None
    kind, text = _split(message)
    callstack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return _bounded(kind, text, callstack if isinstance(callstack, str) else "")


def _last_lines(path: Path) -> list[str]:
    """The last lines that show something, without colours; of a progress bar, what it showed last."""
    lines = (_NOT_TEXT.sub("", line.rpartition("\r")[2]) for line in _read_tail(path).replace("\r\n", "\n").split("\n"))
    return [line[:_LONGEST_LINE].rstrip() for line in lines if line.strip()][-MAX_LOG_LINES:]


def _read_tail(path: Path) -> str:
    try:
        return read_worker_file_from(path, -_TAIL_BYTES, _TAIL_BYTES)[0].decode(errors="replace")
    except OSError:
        return ""


def _from_log(path: Path) -> WorkerError | None:
    tail = _RANK_PREFIX.sub("", _read_tail(path))
    start = tail.rfind(_TRACEBACK)
    if start >= 0:
        # The first line after the traceback's header that is not indented names the exception.
        header_end = start + len(_TRACEBACK)
        found = _EXCEPTION_LINE.search(tail, header_end)
        if found:
            return _bounded(found["kind"], found["message"] or "", tail[start : found.end()])
    found = _CPP_TERMINATE.search(tail)
    if found:
        return _bounded(found["kind"], found["message"], tail[found.start() :])
    return None


def _split(message: str) -> tuple[str, str]:
    """ "ValueError: no" -> ("ValueError", "no"); a message that names no class has kind ''."""
    found = re.match(r"([A-Za-z_][\w.]*)(?:: |$)", message)
    return (found[1], message[found.end() :]) if found else ("", message)


def _bounded(kind: str, message: str, traceback: str) -> WorkerError:
    return WorkerError(re.split(r"[.:]+", kind)[-1], message[:MAX_MESSAGE_CHARS], traceback[-MAX_TRACEBACK_CHARS:])
