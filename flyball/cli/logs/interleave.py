"""Interleave the output of several ranks on one terminal, so that no rank's line cuts another's. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

QUIET_S = 0.1  # after such a pause, show an unfinished line (a progress bar, a prompt) as it is
MAX_HELD_S = 0.1  # show a rank that never pauses at least this often, up to its last line end
MAX_HELD_BYTES = 64 << 10  # or as soon as it has written this much
UNFINISHED_S = 1.0  # show a line that grows and does not end (dots) at least this often
LONG_LINE_BYTES = 4 << 10  # no bar and no prompt: more of an unfinished line is being written
LONG_LINE_QUIET_S = 2.0
MAX_LINE_BYTES = 1 << 20  # stays whole; as docs/how-to/coming-from.md says
GOES_ON = b" [flyball: longer than 1 MiB, goes on below]\n"
_LINE_ENDS = (b"\n", b"\r")
_CURSOR_MOVE = re.compile(rb"\x1b\[\d*[A-H]")


class Piece(NamedTuple):
    """Bytes for one stream (OUT or ERR)."""

    stream: int
    data: bytes


@dataclass(slots=True)
class _Lane:
    held: list[Piece] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0


class Interleaver:
    """Collects the ranks' output, and returns it in pieces that end at a line end or a pause."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}

    def add(self, rank: int, piece: Piece, now: float) -> None:
        """Add output of a rank."""
        lane = self._lanes.setdefault(rank, _Lane())
        if not lane.held:
            lane.first_at = now
        lane.held.append(piece)
        lane.last_at = now

    def take(self, now: float, *, rest: bool = False) -> list[Piece]:
        """Remove and return what can be shown now; with `rest`, everything."""
        return [piece for lane in self._lanes.values() if lane.held for piece in _due(lane, now, rest)]


def _due(lane: _Lane, now: float, rest: bool) -> list[Piece]:
    text = b"".join(piece.data for piece in lane.held)
    is_line = text.endswith(_LINE_ENDS) and text.strip(b"\r\n")  # a bare line end may be part of a progress bar
    unfinished_bytes = len(text) - text.rfind(b"\n") - 1
    pause_s = LONG_LINE_QUIET_S if unfinished_bytes > LONG_LINE_BYTES else QUIET_S
    if rest or is_line or now - lane.last_at >= pause_s:
        return _first(lane, len(text))
    if now - lane.first_at < MAX_HELD_S and len(text) <= MAX_HELD_BYTES:
        return []
    if _CURSOR_MOVE.search(text):  # stacked progress bars must not be cut
        return _first(lane, len(text))
    # Cut after a line end, or before a carriage return, which belongs to the progress bar that follows.
    size_bytes = max(text.rfind(b"\n") + 1, text.rfind(b"\r"), 0)
    if not size_bytes and len(text) > MAX_LINE_BYTES:
        due = _first(lane, MAX_LINE_BYTES)
        return [*due, Piece(due[-1].stream, GOES_ON)]
    if not size_bytes:
        is_slow = now - lane.first_at >= UNFINISHED_S and len(text) <= LONG_LINE_BYTES
        return _first(lane, len(text)) if is_slow else []
    due = _first(lane, size_bytes)
    lane.first_at = now
    return due


def _first(lane: _Lane, size_bytes: int) -> list[Piece]:
    """Remove and return the first `size_bytes` held bytes."""
    due = []
    while size_bytes:
        stream, data = lane.held.pop(0)
        due.append(Piece(stream, data[:size_bytes]))
        if len(data) > size_bytes:
            lane.held.insert(0, Piece(stream, data[size_bytes:]))
        size_bytes -= len(due[-1].data)
    return due


class Lines:
    """Splits one stream into lines, and adds a prefix to each.

    As in torchrun, a carriage return ends a line, so each redraw of a progress bar becomes a line.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._held = b""

    def add(self, data: bytes) -> bytes:
        """Return the lines completed by `data`. A line longer than MAX_LINE_BYTES is returned in pieces."""
        text = (self._held + data).replace(b"\r\n", b"\n")
        held_back = b"\r" if text.endswith(b"\r") else b""  # it may turn out to be \r\n
        *whole, self._held = text.removesuffix(b"\r").replace(b"\r", b"\n").split(b"\n")
        self._held += held_back
        if len(self._held) > MAX_LINE_BYTES:
            whole, self._held = [*whole, self._held + GOES_ON.removesuffix(b"\n")], b""
        return b"".join(self._prefix + line + b"\n" for line in whole)

    def rest(self) -> bytes:
        """Return the unfinished last line, if there is one."""
        held, self._held = self._held, b""
        return self._prefix + held.removesuffix(b"\r") + b"\n" if held else b""
