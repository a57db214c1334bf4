"""The running accounts of jobs' goodput, as far as they were stored, and the newest ratio of each open job."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from sqlalchemy import select

from services.store.sql.database import Database
from services.store.sql.rows import upsert
from services.store.sql.tables import goodput_accounts, goodput_ratios

_COMPRESSION = 1  # as fast as can be


class SqlGoodputAccounts:
    """Thread-safe. What is lost by a power cut is calculated again from the event log."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def load(self, job: str, version: int) -> bytes | None:
        """Return the stored account, None if there is none of this version."""
        query = select(goodput_accounts.c.document).where(
            goodput_accounts.c.job == job, goodput_accounts.c.version == version
        )
        with self._db.read() as connection:
            document = connection.scalar(query)
        try:
            return None if document is None else zlib.decompress(document)
        except zlib.error:
            return None

    def save(self, job: str, version: int, position: int, document: bytes) -> None:
        """Store an account, unless another process has stored one that is further."""
        row = {"job": job, "version": version, "position": position}
        row["document"] = zlib.compress(document, _COMPRESSION)
        stored = select(goodput_accounts.c.position).where(
            goodput_accounts.c.job == job, goodput_accounts.c.version == version
        )
        with self._db.write(durable=False) as connection:
            if (connection.scalar(stored.with_for_update()) or 0) < position:
                upsert(connection, goodput_accounts, [row], replace=("version", "position", "document"))

    def ratios(self) -> Mapping[str, float]:
        """Return job -> its goodput when it was last calculated, of the jobs that have one."""
        with self._db.read() as connection:
            return {row.job: row.ratio for row in connection.execute(select(goodput_ratios))}

    def save_ratio(self, job: str, ratio: float) -> None:
        """Store the newest ratio of a job."""
        with self._db.write(durable=False) as connection:
            upsert(connection, goodput_ratios, [{"job": job, "ratio": ratio}], replace=("ratio",))
