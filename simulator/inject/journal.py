"""What is broken at the moment and by whom: a file per injection, written before the first act and removed after it is
undone. What a killed injector has left is undone by the next one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from flyball.contracts.wire import MALFORMED, decoder_of
from flyball.state_folder import clear_errors, make_folder, write_private
from simulator.inject.processes import look_at


class JournalEntry(msgspec.Struct, frozen=True):
    """An injection with all that undoing it needs."""

    injection_id: str
    fault: str
    target: str  # in words
    plan: dict[str, Any]
    pid: int  # of the injector
    start_ticks: int

    @property
    def is_left(self) -> bool:
        """Whether its injector has ended without undoing it."""
        owner = look_at(self.pid)
        return owner is None or owner.start_ticks != self.start_ticks


class Journal:
    def __init__(self, folder: Path) -> None:
        """`folder`: private, on this machine; shared by all injectors of this user."""
        self._folder = folder
        own = look_at(os.getpid())
        self._start_ticks = own.start_ticks if own is not None else 0

    def note(self, injection_id: str, fault: str, target: str, plan: dict[str, Any]) -> None:
        """Write down what is about to be done. Raises StorageFull or ConfigurationError; then nothing may be done."""
        entry = JournalEntry(injection_id, fault, target, plan, os.getpid(), self._start_ticks)
        path = self._path(injection_id)
        with clear_errors(path):
            make_folder(self._folder)
            write_private(path, msgspec.json.encode(entry))

    def forget(self, injection_id: str) -> None:
        self._path(injection_id).unlink(missing_ok=True)

    def left(self) -> list[JournalEntry]:
        """What injectors that have ended did not undo."""
        return [entry for entry in self.entries() if entry.is_left]

    def entries(self) -> list[JournalEntry]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(decoder_of(JournalEntry).decode(path.read_bytes()))
            except (*MALFORMED, OSError):
                continue  # undone meanwhile, or another release's
        return found

    def _path(self, injection_id: str) -> Path:
        return self._folder / f"{injection_id}.json"
