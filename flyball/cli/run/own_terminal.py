"""Share the terminal of `flyball run` with its workers: they get terminals of the same size and kind, and the input."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec

from flyball.contracts.on_host.console_request import (
    BOTH,
    CONTROL,
    ERR,
    FRAME,
    INPUT,
    MAX_INPUT_BYTES,
    OUT,
    SIZE,
    WINDOW,
    ConsoleRequest,
    console_folder,
    request_path,
)
from flyball.contracts.on_host.os_text import to_text
from flyball.contracts.wire import encode
from flyball.launch.output_flags import Console
from flyball.state_folder import write_private

LOOK_INTERVAL_S = 0.1  # between checks of the terminal's size; keys are passed on at once
DRAIN_TIMEOUT_S = 2.0  # at the end, for the pumps to write everything to the logs
DRAIN_LOOK_S = 0.01
TERMINAL_VARIABLES = ("TERM", "COLORTERM", "TERM_PROGRAM", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")


def console_request(
    console: Console, nproc: int, environ: Mapping[str, str], *, out: TextIO, err: TextIO, one_rank: bool
) -> ConsoleRequest | None:
    """The request for the workers' terminals, given the streams for the ranks' output; None if plain logs will do."""
    here = (OUT if out.isatty() else 0) | (ERR if err.isatty() else 0)
    terminal = tuple(here & console.raw(local_rank) for local_rank in range(nproc))
    differ = any(console.raw(r) not in (0, BOTH) or console.prefixed(r) not in (0, BOTH) for r in range(nproc))
    apart = differ or not _is_same(out, err)
    piped = _piped()
    if not any(terminal) and not apart and not piped:
        return None
    rows, columns = _size(out, err)
    keyboard = one_rank and terminal[0] == BOTH and _has_keyboard()
    environment = {name: to_text(environ[name]) for name in TERMINAL_VARIABLES if name in environ}
    return ConsoleRequest(os.getpid(), terminal, apart, keyboard, piped, rows, columns, environment)


def _is_same(out: TextIO, err: TextIO) -> bool:
    return os.path.sameopenfile(out.fileno(), err.fileno())


def _size(*streams: TextIO) -> tuple[int, int]:
    """Rows and columns of the first stream that is a terminal; (0, 0) if none is."""
    for stream in streams:
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(stream.fileno())
            return size.lines, size.columns
    return 0, 0


def _piped() -> str:
    """A path to this process's stdin for other processes, if it is a pipe or a file; else ''."""
    try:
        kind = os.fstat(0).st_mode
    except OSError:  # stdin is closed
        return ""
    return f"/proc/{os.getpid()}/fd/0" if stat.S_ISFIFO(kind) or stat.S_ISREG(kind) else ""


def _has_keyboard() -> bool:
    """Whether this process may read the keyboard. Reading it in the background would stop the process."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


class OwnTerminal:
    """Keeps the request up to date, and sends the terminal's size and the typed keys to the job's pumps."""

    def __init__(self, host_dir: Path, job: str, request: ConsoleRequest) -> None:
        self._folder = console_folder(host_dir, job)
        self._path = request_path(host_dir, job)
        self._request = request
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """While entered, the workers can use the terminal."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write_request()
        with _keys_at_once() if self._request.keyboard else contextlib.nullcontext():
            self._thread.start()
            try:
                yield
            finally:
                self._stop.set()
                self._thread.join()
                self._path.unlink(missing_ok=True)

    def drain(self) -> None:
        """Wait briefly until the pumps have written the workers' output to the logs."""
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self._pumps() and time.monotonic() < deadline:
            time.sleep(DRAIN_LOOK_S)

    def _run(self) -> None:
        typing = self._request.keyboard
        while not self._stop.is_set():
            if typing and _has_keyboard():
                ready, _, _ = select.select([0], [], [], LOOK_INTERVAL_S)
                if ready:
                    keys = os.read(0, MAX_INPUT_BYTES)
                    typing = bool(keys)  # nothing: the terminal is gone
                    self._send(INPUT, keys)
            else:
                self._stop.wait(LOOK_INTERVAL_S)
            self._follow_size()

    def _follow_size(self) -> None:
        rows, columns = _size(sys.stdout, sys.stderr)
        if (rows, columns) == (self._request.rows, self._request.columns) or not rows:
            return
        self._request = msgspec.structs.replace(self._request, rows=rows, columns=columns)
        self._write_request()  # for the generations that follow
        self._send(WINDOW, SIZE.pack(rows, columns))

    def _send(self, kind: bytes, body: bytes) -> None:
        for pipe in self._pumps():
            with contextlib.suppress(OSError):  # the pump has ended
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(descriptor, FRAME.pack(kind, len(body)) + body)
                finally:
                    os.close(descriptor)

    def _pumps(self) -> list[Path]:
        """The pipes to all live pumps."""
        return [pipe for pipe in self._folder.glob(f"g*/{CONTROL}") if _is_read(pipe)]

    def _write_request(self) -> None:
        write_private(self._path, encode(self._request), durable=False)  # it ends with this command


def _is_read(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """While entered, read keys one by one without echo: the worker's own terminal echoes and edits them.

    Ctrl-C, Ctrl-Z and Ctrl-\\ keep their meaning here.
    """
    before = termios.tcgetattr(0)
    passing = [*before]
    passing[3] &= ~(termios.ICANON | termios.ECHO)
    passing[6] = [*before[6]]
    passing[6][termios.VMIN], passing[6][termios.VTIME] = 1, 0

    def suspend(number: int, _frame: FrameType | None) -> None:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # stops here, until SIGCONT
        signal.signal(number, suspend)

    def resume(_number: int, _frame: FrameType | None) -> None:
        if _has_keyboard():
            termios.tcsetattr(0, termios.TCSADRAIN, passing)

    earlier = {
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, suspend),
        signal.SIGCONT: signal.signal(signal.SIGCONT, resume),
    }
    termios.tcsetattr(0, termios.TCSADRAIN, passing)
    try:
        yield
    finally:
        if _has_keyboard():
            termios.tcsetattr(0, termios.TCSADRAIN, before)
        for number, handler in earlier.items():
            signal.signal(number, handler)
