"""Which hosts' steady positions are stored together. Pure."""

from __future__ import annotations

from zlib import crc32

SLOTS = 32  # documents that the steady positions of all hosts are divided among: the slot of a host never changes


def slot_of(host_id: str) -> int:
    """The document that has a host's steady positions."""
    return crc32(host_id.encode()) % SLOTS
