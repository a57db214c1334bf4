"""The newest check of each host: it begins with its action, and a later round of the policy stores its result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, select

from flyball.contracts.decisions import Decision
from flyball.contracts.reports.host_checks import CheckState, HostCheck
from services.controller.round.view import CheckChange
from services.record.checks import begun_by, is_newest
from services.record.codec import dump, load, number_of
from services.store.sql.rows import upsert
from services.store.sql.set_aside import aside_so_far, readable
from services.store.sql.tables import host_checks


class CheckCache:
    """Reads checks again only after `expire`: nobody but the leading controller writes them, and those of a removed
    host do no harm. Belongs to one thread."""

    def __init__(self) -> None:
        self._known: dict[str, HostCheck] | None = None

    def expire(self) -> None:
        """Read them again."""
        self._known = None

    def read(self, connection: Connection) -> Mapping[str, HostCheck]:
        """Return what `load_checks` returns."""
        if self._known is not None:
            return self._known
        before = aside_so_far()
        found = load_checks(connection)
        self._known = found if aside_so_far() == before else None
        return found


def load_checks(connection: Connection, host_ids: Collection[str] | None = None) -> dict[str, HostCheck]:
    """Return host -> its newest check. None: of all hosts."""
    query = select(host_checks.c.host_id, host_checks.c.document)
    if host_ids is not None:
        query = query.where(host_checks.c.host_id.in_(sorted(host_ids)))
    rows = connection.execute(query).all()
    found = {row.host_id: readable("host_checks", row.host_id, _check, row.document) for row in rows}
    return {host_id: check for host_id, check in found.items() if check is not None}


def _check(document: str) -> HostCheck:
    check: HostCheck = load(document, HostCheck)
    number_of(check.action_id)
    return check


def running(checks: Mapping[str, HostCheck]) -> set[int]:
    """Return the numbers of the actions whose results are not known yet."""
    return {number_of(check.action_id) for check in checks.values() if check.state is CheckState.RUNNING}


def begin(connection: Connection, decided: Sequence[Decision]) -> None:
    """Store the checks that these decisions begin."""
    for decision in decided:
        for change in begun_by(decision):
            upsert(connection, host_checks, [_row(change)], replace=("state", "action", "document"))


def store(connection: Connection, changes: Sequence[CheckChange]) -> None:
    """Store results. A newer check of the host stays as it is."""
    known = load_checks(connection, [change.host_id for change in changes]) if changes else {}
    rows = [_row(change) for change in changes if is_newest(known.get(change.host_id), change)]
    if rows:
        upsert(connection, host_checks, rows, replace=("state", "action", "document"))


def _row(change: CheckChange) -> dict[str, str | int]:
    check = change.check
    return {
        "host_id": change.host_id,
        "state": check.state.value,
        "action": number_of(check.action_id),
        "document": dump(check),
    }
