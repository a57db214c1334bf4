"""Stores what each sensor sees of ranks that stand still: one small document per sensor, and none while all is well."""

from __future__ import annotations

from collections.abc import Mapping

import structlog
from sqlalchemy import delete, select

from flyball.contracts.wire import MALFORMED
from services.record.codec import dump, load
from services.sensor.detector.shared_stands import JobStand
from services.store.sql.database import Database
from services.store.sql.rows import upsert
from services.store.sql.tables import stands as table

log = structlog.get_logger(__name__)

FORGET_AFTER_S = 600.0  # entries of sensors that were killed


class SqlStands:
    def __init__(self, db: Database) -> None:
        self._db = db

    def tell_stands(self, sensor: str, at: float, stands: tuple[JobStand, ...]) -> None:
        """Replace what a sensor told; () removes it. `at`: wall clock."""
        with self._db.write(durable=False) as connection:
            if stands:
                row = {"sensor": sensor, "at": at, "document": dump(stands)}
                upsert(connection, table, [row], replace=("at", "document"))
            else:
                old = table.c.at < at - FORGET_AFTER_S
                connection.execute(delete(table).where((table.c.sensor == sensor) | old))

    def told_stands(self) -> Mapping[str, tuple[float, tuple[JobStand, ...]]]:
        """Return sensor -> when it told, and what. Leaves out a sensor of another release whose words this one does not
        know: to it, that sensor's ranks may work."""
        with self._db.read() as connection:
            rows = connection.execute(select(table)).all()
        told = {}
        for row in rows:
            try:
                told[row.sensor] = (row.at, load(row.document, tuple[JobStand, ...]))
            except MALFORMED as error:
                log.debug("stands_not_understood", sensor=row.sensor, error=str(error))
        return told
