"""How the output of several ranks shares one terminal: no line is cut by another rank's. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

QUIET_S = 0.05  # after this long without more, an unfinished line (a progress bar, a prompt) is shown as it is
MOST_S = 0.1  # a rank that never pauses is shown up to the end of its last line
MAX_HELD_BYTES = 64 << 10
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
    """Takes what ranks write, gives it back in pieces that end with a line or with a pause."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}

    def add(self, rank: int, piece: Piece, now: float) -> None:
        """A rank wrote this."""
        lane = self._lanes.setdefault(rank, _Lane())
        if not lane.held:
            lane.first_at = now
        lane.held.append(piece)
        lane.last_at = now

    def take(self, now: float, *, rest: bool = False) -> list[Piece]:
        """What can be shown now; with `rest`, everything."""
        return [piece for lane in self._lanes.values() if lane.held for piece in _due(lane, now, rest)]


def _due(lane: _Lane, now: float, rest: bool) -> list[Piece]:
    text = b"".join(piece.data for piece in lane.held)
    is_line = text.endswith(_LINE_ENDS) and text.strip(b"\r\n")  # a mere line end may be part of a drawing
    if rest or is_line or now - lane.last_at >= QUIET_S or len(text) > MAX_HELD_BYTES:
        return _first(lane, len(text))
    if now - lane.first_at < MOST_S:
        return []
    if _CURSOR_MOVE.search(text):  # bars one below the other: to be cut nowhere inside
        return _first(lane, len(text))
    # after a line's end, or before the carriage return that begins a bar: it and the bar belong together
    due = _first(lane, max(text.rfind(b"\n") + 1, text.rfind(b"\r"), 0))
    lane.first_at = now
    return due


def _first(lane: _Lane, size_bytes: int) -> list[Piece]:
    """Take that many bytes off what is held."""
    due = []
    while size_bytes:
        stream, data = lane.held.pop(0)
        due.append(Piece(stream, data[:size_bytes]))
        if len(data) > size_bytes:
            lane.held.insert(0, Piece(stream, data[size_bytes:]))
        size_bytes -= len(due[-1].data)
    return due


class Lines:
    """Cuts one stream into lines, each with a prefix. Like torchrun's, it takes a carriage return for an end of line: a
    progress bar becomes a line for each time it is drawn."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._held = b""

    def add(self, data: bytes) -> bytes:
        """The whole lines so far; a line longer than MAX_HELD_BYTES is given in pieces."""
        text = (self._held + data).replace(b"\r\n", b"\n")
        held_back = b"\r" if text.endswith(b"\r") else b""  # a \n may follow, which belongs to it
        *whole, self._held = text.removesuffix(b"\r").replace(b"\r", b"\n").split(b"\n")
        self._held += held_back
        if len(self._held) > MAX_HELD_BYTES:
            whole, self._held = [*whole, self._held], b""
        return b"".join(self._prefix + line + b"\n" for line in whole)

    def rest(self) -> bytes:
        """The last line, if it has no end."""
        held, self._held = self._held, b""
        return self._prefix + held.removesuffix(b"\r") + b"\n" if held else b""
