"""Text of the system (paths, arguments, variables) as valid Unicode. On Linux it is bytes, and Python has half a
surrogate pair for each byte that is not UTF-8: nothing that JSON or a database takes. Pure.

Such a byte becomes a character from the end of the last private plane, which no name has. One that has it all the same
is written byte by byte, so every text comes back as it was.
"""

from __future__ import annotations

import re

_BASE = 0x10FF00  # plus the byte, 0x80 to 0xff
_FOREIGN = re.compile("[\udc80-\udcff\U0010ff80-\U0010ffff]")
_OURS = re.compile("[\U0010ff80-\U0010ffff]")


def to_text(system: str) -> str:
    """Valid Unicode, from which `from_text` makes `system` again."""
    return system if system.isascii() else _FOREIGN.sub(_escaped, system)


def _escaped(found: re.Match[str]) -> str:
    return "".join(chr(_BASE + byte) for byte in found[0].encode(errors="surrogateescape"))


def from_text(text: str) -> str:
    """What the system calls it."""
    if text.isascii() or not _OURS.search(text):
        return text
    encoded = b"".join(bytes([ord(c) & 0xFF]) if _OURS.match(c) else c.encode(errors="surrogateescape") for c in text)
    return encoded.decode(errors="surrogateescape")
