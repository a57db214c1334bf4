"""Room for commands that must be obeyed on a full disk: a file of fixed size, made in advance and written in place.

Each slot has a command and its digest. One that a power cut has torn counts as empty: its command was not obeyed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flyball.contracts import wire
from flyball.contracts.errors import FlyballError, StorageFull
from flyball.contracts.identity import Fence
from flyball.contracts.reports.standings import LastObeyed
from flyball.state_folder import clear_errors, write_private

SLOT_BYTES = 4096
SLOTS = 256
_DIGEST_BYTES = 16
_LENGTH_BYTES = 4


class ReservedCommand(msgspec.Struct, frozen=True):
    """A command that was obeyed while the database could not grow."""

    number: int  # from 1, in the order in which they were obeyed
    job: str
    fence: Fence
    obeyed: LastObeyed  # this command included

    @property
    def command_id(self) -> str:
        return self.obeyed.command_id


class Reserve:
    """The file. Call `open` first; all calls come from one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._slots: dict[int, ReservedCommand] = {}
        self._is_there = False

    @property
    def commands(self) -> list[ReservedCommand]:
        """Those that are not forgotten, oldest first."""
        return sorted(self._slots.values(), key=lambda command: command.number)

    def open(self) -> None:
        """Read the file, or make it, also if somebody removed it; harmless if repeated. Raises StorageFull or
        ConfigurationError if it cannot be made: then nothing can be added."""
        if self._is_there and self._path.exists():
            return
        self._is_there = False
        with clear_errors(self._path):
            data = self._path.read_bytes() if self._path.exists() else b""
            read = {slot: _unpacked(data[slot * SLOT_BYTES :][:SLOT_BYTES]) for slot in range(SLOTS)}
            self._slots |= {slot: command for slot, command in read.items() if command is not None}
            if len(data) != SLOTS * SLOT_BYTES:
                write_private(self._path, b"".join(_packed(self._slots.get(slot)) for slot in range(SLOTS)))
        self._is_there = True

    def add(self, command: ReservedCommand) -> None:
        """Write a command durably. Raises StorageFull if there is no file or no slot for it, or ConfigurationError."""
        slot = self._free_slot() if self._is_there else None
        if slot is None:
            raise StorageFull(f"There is no room left in {self._path}.", hint="free space on that disk")
        self._write(slot, _packed(command))
        self._slots[slot] = command

    def forget(self, upto: int) -> None:
        """The database has the commands up to this number. Raises ConfigurationError if they cannot be removed."""
        for slot, command in list(self._slots.items()):
            if command.number <= upto:
                self._write(slot, _packed(None))
                del self._slots[slot]

    def _write(self, slot: int, data: bytes) -> None:
        with clear_errors(self._path):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, data, slot * SLOT_BYTES)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _free_slot(self) -> int | None:
        """An unused slot; or that of the oldest command after which another of its job came: what is forgotten is that
        a late repeat of it was obeyed, never a fence."""
        for slot in range(SLOTS):
            if slot not in self._slots:
                return slot
        return oldest_replaced(self._slots)


def oldest_replaced(slots: Mapping[int, ReservedCommand]) -> int | None:
    """The slot of the oldest command that is not the newest of its job. Pure."""
    newest = {command.job: command.number for command in sorted(slots.values(), key=lambda one: one.number)}
    replaced = [(command.number, slot) for slot, command in slots.items() if newest[command.job] != command.number]
    return min(replaced)[1] if replaced else None


def _packed(command: ReservedCommand | None) -> bytes:
    """A slot: digest, length, JSON, zeros."""
    if command is None:
        return bytes(SLOT_BYTES)
    text = wire.encode(command)
    body = len(text).to_bytes(_LENGTH_BYTES, "big") + text
    if len(body) > SLOT_BYTES - _DIGEST_BYTES:
        raise StorageFull("A command is too long to be noted on a full disk.", hint="free space on that disk")
    return (_digest(body) + body).ljust(SLOT_BYTES, b"\0")


def _unpacked(slot: bytes) -> ReservedCommand | None:
    length = int.from_bytes(slot[_DIGEST_BYTES:][:_LENGTH_BYTES], "big")
    body = slot[_DIGEST_BYTES:][: _LENGTH_BYTES + length]
    if not length or _digest(body) != slot[:_DIGEST_BYTES]:
        return None
    try:
        return wire.decode(body[_LENGTH_BYTES:], ReservedCommand)
    except FlyballError:  # of another release
        return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
