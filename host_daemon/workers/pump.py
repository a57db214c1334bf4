"""Copies what workers write to terminals and pipes into their logs: `python -I -S pump.py STATE_DIR ORDER`.

A process of its own that outlives the daemon. One file that imports nothing of ours, so it is small and starts at once.
It ends once all channels have ended, that is, nobody holds their other side. It never blocks training: what cannot be
written is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

READ_SIZE_BYTES = 64 << 10
HOLD_S = 0.05  # the start of a line waits so long for its rest: unbuffered, `print` writes a line in pieces
ERR = 2
FRAME = struct.Struct("<cH")  # as in flyball.contracts.on_host.console_request
SIZE = struct.Struct("<HH")


class Channel:
    """One end of a terminal or a pipe, and the log that its bytes go to."""

    def __init__(self, descriptor: int, log: str, stream: int, is_terminal: bool) -> None:
        self.descriptor = descriptor
        self.is_terminal = is_terminal
        self._log = _append_to(Path(log))
        self._ranges = _append_to(Path(log).with_suffix(".stderr-ranges")) if stream == ERR else None
        self._held = b""  # the start of a line, so that no other stream's bytes come between
        self._held_at_s = 0.0
        os.set_blocking(descriptor, False)

    def copy(self) -> bool:
        """Copy the lines that are available. Returns False at the end."""
        try:
            data = os.read(self.descriptor, READ_SIZE_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # a terminal whose other side nobody holds
            data = b""
        is_whole = self.is_terminal or not data
        end = len(data) if is_whole else data.rfind(b"\n") + 1
        if is_whole or end or len(self._held) >= READ_SIZE_BYTES:
            self._write(self._held + data[:end])
            self._held = b""
        if not self._held:
            self._held_at_s = time.monotonic()
        self._held += data[end:]
        return bool(data)

    def holds(self) -> bool:
        """Whether the start of a line is held; not one that has waited long enough."""
        if self._held and time.monotonic() - self._held_at_s >= HOLD_S:
            self._write(self._held)
            self._held = b""
        return bool(self._held)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        with contextlib.suppress(OSError):  # a full disk loses output, not training
            if self._ranges is not None:  # before the bytes, so that a reader of the bytes finds it
                begin = os.lseek(self._log, 0, os.SEEK_END)
                os.write(self._ranges, b"%d %d\n" % (begin, len(data)))
            _write_all(self._log, data)


def _append_to(path: Path) -> int:
    # As flyball.worker_files does: a script may have put a FIFO or a link there.
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags, 0o600)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class Control:
    """Handles what the launching command sends: the size of its terminal, and keys typed."""

    def __init__(self, path: str, channels: list[Channel], keyboard: bool) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # as a writer too: it never ends
        self._terminals = [channel.descriptor for channel in channels if channel.is_terminal]
        self._keyboard = keyboard
        self._held = b""

    def obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._held += os.read(self.descriptor, READ_SIZE_BYTES)
        while len(self._held) >= FRAME.size:
            kind, length = FRAME.unpack_from(self._held)
            end = FRAME.size + length
            if len(self._held) < end:
                return
            body, self._held = self._held[FRAME.size : end], self._held[end:]
            if kind == b"W" and length == SIZE.size:
                self._resize(*SIZE.unpack(body))
            elif kind == b"I" and self._keyboard and self._terminals:
                with contextlib.suppress(OSError):  # the queue is full: nobody reads the keys
                    _write_all(self._terminals[0], body)

    def _resize(self, rows: int, columns: int) -> None:
        for descriptor in self._terminals:
            with contextlib.suppress(OSError):
                fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the workers
    order = json.loads(sys.argv[2])
    channels = {c["descriptor"]: Channel(**c) for c in order["channels"]}
    control = Control(order["control"], list(channels.values()), order["keyboard"])
    ready = select.poll()
    for descriptor in (*channels, control.descriptor):
        ready.register(descriptor, select.POLLIN)
    while channels:
        is_holding = any([channel.holds() for channel in channels.values()])
        for descriptor, _ in ready.poll(HOLD_S * 1000.0 if is_holding else None):
            if descriptor == control.descriptor:
                control.obey()
            elif not channels[descriptor].copy():
                ready.unregister(descriptor)
                del channels[descriptor]
    with contextlib.suppress(OSError):
        Path(order["control"]).unlink()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
