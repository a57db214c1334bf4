"""Remembers on this machine which copies did not verify when they were last read, so that nothing calls them good
without reading them again.

A note is about the bytes that were read: it no longer applies once the copy is written again. It changes no store, and
forbids nothing. Every restore reads and decides for itself, since this machine's memory may have been at fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from ckpt_engine.inspect.inventory import HeldCopy
from ckpt_engine.inspect.verify_copies import CopyVerdict, Verified
from flyball.contracts.wire import MALFORMED, decoder_of
from flyball.state_folder import write_private

_MOST_NOTES: Final = 10_000  # the newest are kept


class _Notes(msgspec.Struct, frozen=True):
    """`problems`: what identifies a copy's bytes -> why they are bad."""

    problems: dict[str, str] = {}


class KnownBad:
    """The notes in one file."""

    def __init__(self, path: Path) -> None:
        """A missing or unreadable file has no notes."""
        self._path = path
        self._problems: dict[str, str] = {}
        try:
            self._problems = dict(decoder_of(_Notes).decode(path.read_bytes()).problems)
        except (OSError, *MALFORMED):
            return

    def problem(self, held: HeldCopy) -> str:
        """Why the copy is known to be bad; '' if it is not."""
        if not any(key.startswith(_head(held)) for key in self._problems):
            return ""  # without a look at the copy
        return self._problems.get(_identity(held), "")

    def learn(self, results: Iterable[tuple[HeldCopy, Verified]]) -> None:
        """Note the bad copies, and forget the notes about good ones. Without a file to write to, nothing is kept."""
        before = dict(self._problems)
        for held, result in results:
            if result.verdict is CopyVerdict.BAD:
                self._problems[_identity(held)] = result.problem
            elif result.verdict is CopyVerdict.GOOD:
                self._problems.pop(_identity(held), None)
        if self._problems == before:
            return
        newest = dict(list(self._problems.items())[-_MOST_NOTES:])
        try:
            write_private(self._path, msgspec.json.encode(_Notes(newest)))
        except OSError:
            return


def _head(held: HeldCopy) -> str:
    copy = held.copy
    return f"{held.place.tier} {held.place.where} {copy.generation} {copy.step} {copy.rank} {copy.digest} "


def _identity(held: HeldCopy) -> str:
    return _head(held) + held.place.version(held.copy)
