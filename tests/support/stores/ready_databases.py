"""Databases that already have the schema of this release, since migrating one for every test takes far too long."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pymysql
from pymysql.cursors import Cursor

from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate

SERVER = {"host": "127.0.0.1", "port": 3306, "user": "root", "password": "", "connect_timeout": 60, "autocommit": True}

Rows = list[tuple[object, ...]]


class ReadyDatabases:
    """One process's. SQLite files are copied from one; MariaDB databases are emptied and used again."""

    def __init__(self, folder: Path) -> None:
        self._template = folder / "template.sqlite"
        self._server: pymysql.Connection[Cursor] | None = None
        self._cursor: Cursor
        self._unused: list[str] = []
        self._columns: Rows = []
        self._first_rows: dict[str, Rows] = {}

    def sqlite(self, file: Path) -> str:
        """Make a database at `file`. Returns its URL."""
        if not self._template.exists():
            database = Database(f"sqlite:///{self._template}")
            migrate(database)
            database.close()
        shutil.copyfile(self._template, file)
        return f"sqlite:///{file}"

    def mariadb(self) -> str:
        """The name of a database on the local server. Raises OperationalError without a server."""
        if self._server is None:
            self._server = pymysql.connect(**SERVER)
            self._cursor = self._server.cursor()
        return self._unused.pop() if self._unused else self._make()

    def give_back(self, name: str) -> None:
        """Empty it for another test; drop it if it has another schema by now, or is still in use."""
        users = self._query("SELECT id FROM information_schema.processlist WHERE db = %s", name)
        if users or self._columns_in(name) != self._columns:
            self._cursor.execute(f"DROP DATABASE {name}")
            return
        self._server.select_db(name)  # type: ignore[union-attr]
        self._cursor.execute("SET foreign_key_checks = 0")
        self._cursor.execute("BEGIN")
        for table in dict.fromkeys(table for table, *_ in self._columns):
            self._cursor.execute(f"DELETE FROM `{table}`")
        for table, rows in self._first_rows.items():
            self._cursor.executemany(f"INSERT INTO `{table}` VALUES ({', '.join(['%s'] * len(rows[0]))})", rows)
        self._cursor.execute("UPDATE cluster SET cluster_id = %s", (uuid.uuid4().hex,))
        self._cursor.execute("COMMIT")
        self._unused.append(name)

    def close(self) -> None:
        for name in self._unused:
            self._cursor.execute(f"DROP DATABASE {name}")
        if self._server is not None:
            self._server.close()

    def _make(self) -> str:
        name = f"flyball_test_{uuid.uuid4().hex[:12]}"
        self._cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        database = Database(mariadb_url(name))
        migrate(database)
        database.close()
        self._columns = self._columns_in(name)
        tables = dict.fromkeys(table for table, *_ in self._columns)
        rows = {table: self._query(f"SELECT * FROM {name}.`{table}`") for table in tables}
        self._first_rows = {table: found for table, found in rows.items() if found}
        return name

    def _columns_in(self, name: str) -> Rows:
        return self._query(
            "SELECT table_name, column_name, column_type FROM information_schema.columns"
            " WHERE table_schema = %s ORDER BY table_name, ordinal_position",
            name,
        )

    def _query(self, statement: str, *values: str) -> Rows:
        self._cursor.execute(statement, values)
        return list(self._cursor.fetchall())


def mariadb_url(name: str) -> str:
    """The URL of a database on the local server."""
    return f"mysql://root@127.0.0.1:3306/{name}"
