"""Shows the control characters of a job's output as text, for a terminal.

A script's output is its submitter's. Raw, it could set the clipboard of whoever reads it (OSC 52), hide what was
printed before, or turn the direction of writing. Colours, line ends, tabs and the carriage returns of progress bars do
not harm, and pass.
"""

from __future__ import annotations

import codecs
import re
from typing import BinaryIO, cast

_COLOUR = r"\x1b\[[0-9;:]{0,60}m"
_SHOWN = re.compile(rf"({_COLOUR})|([^\n\t\r\x20-\x7e])")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:]{0,60})?\Z")  # it may become a colour
_BYTE = 0xDC00  # what the decoder adds to a byte that is no UTF-8


class EscapedOutput:
    """A binary stream on a terminal."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""

    @classmethod
    def on(cls, out: BinaryIO, *, raw: bool) -> BinaryIO:
        """`out` as it is, if it is no terminal or is wanted `raw`."""
        return out if raw or not out.isatty() else cast("BinaryIO", cls(out))

    def write(self, data: bytes) -> int:
        text = self._held + self._decoder.decode(data)
        unfinished = _UNFINISHED.search(text)
        self._held = unfinished[0] if unfinished else ""
        self._out.write(_escaped(text.removesuffix(self._held)))
        return len(data)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()


def _escaped(text: str) -> bytes:
    return _SHOWN.sub(_shown, text).encode()


def _shown(found: re.Match[str]) -> str:
    character = found[2]
    if character is None or character.isprintable():
        return found[0]
    if _BYTE <= ord(character) <= _BYTE + 0xFF:
        return f"\\x{ord(character) - _BYTE:02x}"
    return character.encode("unicode_escape").decode()
