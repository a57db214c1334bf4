"""The documents of steady positions: those of some hundred hosts each, instead of a row per host and report.

An entry goes with one version of its host's row. Whoever rewrites the row makes the entry void, without knowing of it;
the next writer of the document drops it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import msgspec
from sqlalchemy import Connection, func, select

from services.record.codec import dump
from services.record.positions import SteadyPositions, read_steady
from services.sensor.rules.slots import slot_of
from services.store.sql.rows import new_version, upsert
from services.store.sql.set_aside import readable
from services.store.sql.tables import host_reports, steady_positions

_CHUNK = 1000  # hosts that one query names
_LOW = (1 << 32) - 1
_NONE = -1  # a version that no document has
_COLUMNS = steady_positions.c

Entries: TypeAlias = Mapping[str, SteadyPositions]  # by host


class Document(msgspec.Struct, frozen=True):
    version: int
    entries: Entries


class SteadyDocuments:
    """Keeps decoded documents until they change. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[int, Document] = {}

    def read(self, connection: Connection, slots: Collection[int] | None = None) -> list[SteadyPositions]:
        """Bring these documents up to date (None: all), and return the entries of those that changed."""
        query = select(_COLUMNS.slot, _COLUMNS.version)
        if slots is not None:
            query = query.where(_COLUMNS.slot.in_(sorted(slots)))
        versions = {slot: version for slot, version in connection.execute(query)} if slots != set() else {}
        changed = [slot for slot, version in versions.items() if self._version(slot) != version]
        found: list[SteadyPositions] = []
        fresh: dict[int, Document] = {}  # taken in at the end: whoever reads may be broken off in between
        for slot in changed:
            mine = select(_COLUMNS.version, _COLUMNS.document).where(_COLUMNS.slot == slot)
            version, document = connection.execute(mine).one()
            entries = readable("steady_positions", slot, read_steady, document)
            fresh[slot] = Document(
                version if entries is not None else _NONE, {entry.host_id: entry for entry in entries or ()}
            )
            found += entries or ()
        self._known |= fresh
        return found

    def of(self, host_id: str, version: int) -> SteadyPositions | None:
        """Return the entry of a host that goes with this version of its row."""
        known = self._known.get(slot_of(host_id))
        entry = known.entries.get(host_id) if known is not None else None
        return entry if entry is not None and entry.version == version else None

    def written(self, documents: Mapping[int, Document]) -> None:
        """Take in documents of a transaction that is committed."""
        self._known |= documents

    def merge(self, connection: Connection, fresh: Iterable[SteadyPositions]) -> tuple[set[str], dict[int, Document]]:
        """Write entries into their documents. Return the hosts whose rows have another version, and which have no entry
        now; and the documents, for `written`."""
        by_slot: dict[int, dict[str, SteadyPositions]] = {}
        for entry in fresh:
            by_slot.setdefault(slot_of(entry.host_id), {})[entry.host_id] = entry
        self._lock(connection, by_slot.keys())
        entries = {slot: _newest(self._entries(slot), mine) for slot, mine in sorted(by_slot.items())}
        every = {name: one.version for of_slot in entries.values() for name, one in of_slot.items()}
        if not _all_are(connection, every):
            rows = _versions(connection, list(every))
            entries = {
                slot: {name: one for name, one in of_slot.items() if rows.get(name) == one.version}
                for slot, of_slot in entries.items()
            }
        documents = {slot: Document(new_version(), of_slot) for slot, of_slot in entries.items()}
        texts = {slot: dump(list(document.entries.values())) for slot, document in documents.items()}
        values = [{"slot": slot, "version": documents[slot].version, "document": texts[slot]} for slot in documents]
        upsert(connection, steady_positions, values, replace=("version", "document"))
        unwritten = {name for slot, mine in by_slot.items() for name in mine if name not in documents[slot].entries}
        return unwritten, documents

    def _lock(self, connection: Connection, slots: Collection[int]) -> None:
        """Bring these documents up to date, and keep them so until the commit."""
        empty = [{"slot": slot, "version": new_version(), "document": "[]"} for slot in sorted(slots)]
        locked = select(_COLUMNS.slot).where(_COLUMNS.slot.in_(sorted(slots))).order_by(_COLUMNS.slot).with_for_update()
        if len(connection.execute(locked).all()) < len(slots):  # as only for the first hosts ever
            upsert(connection, steady_positions, empty)
            connection.execute(locked).all()
        self.read(connection, slots)

    def _entries(self, slot: int) -> Entries:
        return self._known[slot].entries

    def _version(self, slot: int) -> int:
        known = self._known.get(slot)
        return known.version if known is not None else _NONE


def _newest(known: Entries, fresh: Entries) -> Entries:
    """Return all entries; of a host that now reports to another sensor, the one that was received last. With the same
    row only the host's own clock counts: a sensor's may be set back."""
    late = (name for name, one in fresh.items() if name in known and _is_newer(known[name], one))
    return {**known, **fresh, **{name: known[name] for name in late}}


def _is_newer(known: SteadyPositions, fresh: SteadyPositions) -> bool:
    if known.version == fresh.version:
        return known.sent_at > fresh.sent_at
    return known.at > fresh.at


def _all_are(connection: Connection, versions: Mapping[str, int]) -> bool:
    """Return whether the rows of these hosts have these versions. By their sums, in halves that no database rounds:
    versions are random, and a changed one changes these."""
    column = host_reports.c.version
    found, wanted = [0, 0, 0], [len(versions), 0, 0]
    for version in versions.values():
        wanted[1] += version >> 32
        wanted[2] += version & _LOW
    names = list(versions)
    for first in range(0, len(names), _CHUNK):
        sums = select(func.count(), func.sum(column.bitwise_rshift(32)), func.sum(column.bitwise_and(_LOW)))
        row = connection.execute(sums.where(host_reports.c.host_id.in_(names[first : first + _CHUNK]))).one()
        found = [total + int(part or 0) for total, part in zip(found, row, strict=True)]
    return found == wanted


def _versions(connection: Connection, host_ids: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for first in range(0, len(host_ids), _CHUNK):
        query = select(host_reports.c.host_id, host_reports.c.version)
        named = query.where(host_reports.c.host_id.in_(host_ids[first : first + _CHUNK]))
        found |= {host_id: version for host_id, version in connection.execute(named)}
    return found
