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
from flyball.contracts.errors import InvalidMessage, StateVersionMismatch, StorageFull
from flyball.contracts.identity import CommandId, Fence
from flyball.contracts.reports.standings import LastObeyed
from flyball.state_folder import clear_errors, write_private

SLOT_BYTES = 4096
SLOTS = 256
_BYTES = SLOTS * SLOT_BYTES
_DIGEST_BYTES = 16
_LENGTH_BYTES = 4
_BLOCK_BYTES = 512  # the unit of st_blocks


class ReservedCommand(msgspec.Struct, frozen=True):
    """A command that was obeyed while the database could not grow."""

    number: int  # from 1, in the order in which they were obeyed
    job: str
    fence: Fence
    obeyed: LastObeyed  # this command included
    stored: CommandId  # the newest in the database then; if it has another, a release without a reserve ran since

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
        """Read the file, or make it, also if somebody removed it; harmless if repeated.

        Raises StorageFull if there is no room to make it: then nothing can be added. Raises ConfigurationError if it
        cannot be used, or StateVersionMismatch if another release wrote it: then nobody knows which fences it has.
        """
        with clear_errors(self._path, hint="check the disk: the file may have orders that must not be forgotten"):
            if self._is_there and self._path.exists():
                return
            self._is_there = False
            size, allocated, found = self._read()
            self._slots |= found
            self._is_there = size == _BYTES
            if not self._is_there or allocated < _BYTES:  # a backup was restored with holes, say: it reserves nothing
                write_private(self._path, b"".join(_packed(self._slots.get(slot)) for slot in range(SLOTS)))
        self._is_there = True

    def give_back(self) -> None:
        """Remove the file, if there is no command in it: nobody will run on this host's state soon."""
        with clear_errors(self._path):
            self._slots |= self._read()[2]
            if not self._slots:
                self._path.unlink(missing_ok=True)
                self._is_there = False

    def add(self, command: ReservedCommand) -> None:
        """Write a command durably. Raises StorageFull if there is no file or no slot for it, or ConfigurationError."""
        slot = self._free_slot() if self._is_there else None
        if slot is None:
            raise StorageFull(f"There is no room left in {self._path}.", hint="free space on that disk")
        self._write({slot: _packed(command)})
        self._slots[slot] = command

    def forget(self, upto: int) -> None:
        """The database has the commands up to this number. Raises ConfigurationError if they cannot be removed."""
        gone = [slot for slot, command in self._slots.items() if command.number <= upto]
        if gone:
            self._write(dict.fromkeys(gone, _packed(None)))
            for slot in gone:
                del self._slots[slot]

    def _read(self) -> tuple[int, int, dict[int, ReservedCommand]]:
        """The bytes of the file, those that it has on the disk, and its commands by slot. Raises OSError or
        StateVersionMismatch."""
        try:
            with self._path.open("rb") as file:
                status, data = os.fstat(file.fileno()), file.read()
        except FileNotFoundError:
            return 0, 0, {}
        if len(data) > _BYTES:
            raise _of_another_release(self._path)
        try:
            read = {slot: _unpacked(data[slot * SLOT_BYTES :][:SLOT_BYTES]) for slot in range(SLOTS)}
        except InvalidMessage as error:
            raise _of_another_release(self._path) from error
        found = {slot: command for slot, command in read.items() if command is not None}
        return len(data), status.st_blocks * _BLOCK_BYTES, found

    def _write(self, slots: Mapping[int, bytes]) -> None:
        with clear_errors(self._path):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for slot, data in slots.items():
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
    """What a slot has; None: nothing, or a torn command. Raises InvalidMessage if another release wrote it."""
    length = int.from_bytes(slot[_DIGEST_BYTES:][:_LENGTH_BYTES], "big")
    body = slot[_DIGEST_BYTES:][: _LENGTH_BYTES + length]
    if not length or _digest(body) != slot[:_DIGEST_BYTES]:
        return None
    return wire.decode(body[_LENGTH_BYTES:], ReservedCommand)


def _of_another_release(path: Path) -> StateVersionMismatch:
    return StateVersionMismatch(
        f"{path} has commands that this release of Flyball cannot read.",
        hint="run the release that wrote it, or remove the file if no job runs on this host",
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
