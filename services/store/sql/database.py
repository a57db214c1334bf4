"""Connections and transactions, for SQLite (one machine) and MySQL or MariaDB (several machines) alike.

Reads are consistent snapshots. Writes on SQLite are BEGIN IMMEDIATE, one at a time. On MySQL they are READ COMMITTED
and lock the rows that they change. Database failures surface as FlyballErrors with a hint.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, DisconnectionError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from flyball.contracts.errors import (
    ConfigurationError,
    FlyballError,
    InvalidMessage,
    NotFound,
    StorageFull,
    Unreachable,
)
from services.store.sql.broken_text import MYSQL_ENCODING, text_of
from services.store.sql.failures import is_deadlock, is_not_primary, is_without_tables, translate
from services.store.sql.kept_reads import mark_written, note_writes
from services.store.sql.left_state import read_only_uri

T = TypeVar("T")

BUSY_TIMEOUT_S = 10.0  # the longest wait for another transaction's lock
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 20.0  # the longest wait for a reply of a MySQL server; longer than a lock wait
MIGRATION_ANSWER_TIMEOUT_S = 86_400.0  # the same in migrations: altering a large table may take hours
PROBLEM_FRESH_S = 10.0  # loops try again after two seconds at most
MAX_ATTEMPTS = 5  # of a transaction that the server rolls back in a deadlock

_DURABLE = "flyball_durable"  # an execution option of a connection
_DRIVERS = {"sqlite": "sqlite+pysqlite", "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}


class Database:
    """One database. Thread-safe; a process needs one instance for each URL."""

    def __init__(self, url: str, *, read_only: bool = False, busy_timeout_s: float | None = None) -> None:
        """Connect at the first use. Raises ConfigurationError for a URL that Flyball cannot use.

        `url`: `sqlite:////var/lib/flyball/flyball.sqlite` or `mysql://user:password@host:3306/name`. `read_only`:
        writes fail, and an SQLite file stays unchanged to the last byte. `busy_timeout_s` None: BUSY_TIMEOUT_S.
        """
        self.url = _parse(url)
        self.name = self.url.render_as_string(hide_password=True)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._busy_timeout_s = busy_timeout_s or BUSY_TIMEOUT_S
        # SQLite polls for its lock; within a process a mutex hands over at once.
        self._writers = threading.Lock() if self.is_sqlite else None
        self.make_schema: Callable[[], None] | None = None  # for a file that replaced ours; see `migrate`
        self._has_no_schema = False
        self._refused: tuple[FlyballError, float] | None = None  # the last write, if it was, and when
        if self.is_sqlite:
            self._reader, self._writer = _sqlite_engines(self.url, self._busy_timeout_s, read_only=read_only)
        else:
            self._reader = _mysql_engine(self.url, self._busy_timeout_s, isolation_level="REPEATABLE READ")
            self._writer = _mysql_engine(self.url, self._busy_timeout_s, isolation_level="READ COMMITTED")
        note_writes(self._writer)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Run the block in a transaction in which all reads see the same state."""
        self._make_schema_anew()
        with self._translated(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """Run the block in a transaction that commits at its end, and stores nothing if it raises.

        A commit survives the kill of any process. `durable=False` is for data that is sent again anyway: SQLite then
        does not wait for the disk, and a power cut may undo the newest such commits (never out of order).
        """
        self._make_schema_anew()
        try:
            with self._write(durable=durable) as connection:
                yield connection
                mark_written(connection)
        except (StorageFull, ConfigurationError) as error:
            self._refused = error, time.monotonic()
            raise
        self._refused = None

    @property
    def write_problem(self) -> FlyballError | None:
        """Why nothing can be stored, for example since the disk is full; None if it can, or nobody tried lately."""
        refused = self._refused
        return refused[0] if refused is not None and time.monotonic() - refused[1] < PROBLEM_FRESH_S else None

    @contextmanager
    def _write(self, *, durable: bool) -> Iterator[Connection]:
        if self._writers is None:
            with self._translated(), self._writer.begin() as connection:
                yield connection
            return
        if not self._writers.acquire(timeout=self._busy_timeout_s):
            raise Unreachable(
                f"The database {self.name} was busy for {self._busy_timeout_s:g} s.",
                hint="find the process that holds it",
            )
        try:
            with (
                self._translated(),
                self._writer.connect().execution_options(**{_DURABLE: durable}) as connection,
                connection.begin(),
            ):
                yield connection
        finally:
            self._writers.release()

    def transact(self, work: Callable[[Connection], T], *, durable: bool = True) -> T:
        """Run `work` in a write transaction. Run it again from the start if the server ends it in a deadlock."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with self.write(durable=durable) as connection:
                    return work(connection)
            except Unreachable as error:
                if attempt == MAX_ATTEMPTS or not is_deadlock(error.__cause__):
                    raise
        raise AssertionError("the loop returns or raises")

    @contextmanager
    def migration(self) -> Iterator[Connection]:
        """Like `write`, for long statements: a timeout would not end them in the server. Leaves the marks of tables
        (`kept_reads`) alone, which may not be there yet."""
        if self.is_sqlite:
            with self._write(durable=True) as connection:
                yield connection
            return
        engine = _mysql_engine(
            self.url,
            self._busy_timeout_s,
            isolation_level="READ COMMITTED",
            answer_timeout_s=MIGRATION_ANSWER_TIMEOUT_S,
        )
        try:
            with self._translated(), engine.begin() as connection:
                yield connection
        finally:
            engine.dispose()

    def _make_schema_anew(self) -> None:
        if self._has_no_schema and self.make_schema is not None:
            self._has_no_schema = False  # first, because `make_schema` uses this database
            self.make_schema()

    def close(self) -> None:
        """Close all connections."""
        self._reader.dispose()
        self._writer.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (DataError, OverflowError) as error:
            raise InvalidMessage(
                f"A value does not fit its column in {self.name}: {error.args[0]}.", hint="fix its sender"
            ) from error
        except DBAPIError as error:
            translated = translate(error, self.name)
            if translated is None:
                raise
            if self.make_schema is not None and is_without_tables(error):
                self._has_no_schema = True
                raise Unreachable(
                    f"The database file {self.name} was removed or replaced.",
                    hint="nothing to do: it is created again, and running jobs are adopted from their hosts",
                ) from error
            raise translated from error
        except PoolTimeout as error:
            raise Unreachable(
                f"All connections to {self.name} are in use.", hint="check whether the database is slow or overloaded"
            ) from error


def open_existing(url: str) -> Database:
    """Return a database for reading only. Raises NotFound for an SQLite file that does not exist, which connecting
    would create."""
    db = Database(url, read_only=True)
    if db.is_sqlite and not Path(db.url.database or "").is_file():
        raise NotFound(
            f"There is no database file {db.url.database}.",
            hint="a supervisor's file is flyball.sqlite in its state folder; an absolute path takes four slashes",
        )
    return db


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
        if backend not in _DRIVERS:
            raise NoSuchModuleError(backend)
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigurationError(
            "Flyball cannot use this database URL.",
            hint="use sqlite:////absolute/path/flyball.sqlite or mysql://user:password@host:3306/flyball",
        ) from error
    if not parsed.database or (backend == "sqlite" and parsed.database == ":memory:"):
        raise ConfigurationError(
            "The database URL names no database.", hint="add a file path (SQLite) or a database name (MySQL)"
        )
    return parsed.set(drivername=_DRIVERS[backend])


def _sqlite_engines(url: URL, busy_timeout_s: float, *, read_only: bool) -> tuple[Engine, Engine]:
    def connected(pragmas: tuple[str, ...]) -> Callable[[Any, object], None]:
        def set_up(connection: Any, _record: object) -> None:  # noqa: ANN401 - a DBAPI connection has no type
            connection.isolation_level = None  # the driver would begin transactions itself, and not IMMEDIATE ones
            connection.text_factory = text_of
            for pragma in pragmas:
                connection.execute(f"PRAGMA {pragma}").fetchall()

        return set_up

    def begin_read(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    def begin_write(connection: Connection) -> None:
        # FULL waits for the disk: if a power cut undid a commit, the same epoch or action number would be given out
        # twice.
        durable = connection.get_execution_options().get(_DURABLE, True)
        connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        begin_immediate(connection, url.database or "", timeout_s=busy_timeout_s)

    def checked_out(_connection: object, record: ConnectionPoolEntry, _proxy: object) -> None:
        """Reconnect if the file was replaced: an open connection would keep using the removed one."""
        file = _identity(url.database or "")
        if record.info.setdefault("file", file) != file:
            raise DisconnectionError

    common = (f"busy_timeout={int(busy_timeout_s * 1000)}", "foreign_keys=ON")
    # Hide parameters from errors and logs: a job's specification may carry secrets in its environment.
    writer = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=busy_timeout_s, hide_parameters=True)
    event.listen(writer, "connect", connected((*common, "journal_mode=WAL")))
    event.listen(writer, "begin", begin_write)
    event.listen(writer, "checkout", checked_out)
    opened = {"creator": lambda: _open_read_only(Path(url.database or ""))} if read_only else {}
    reader = create_engine(
        url, pool_size=4, max_overflow=12, pool_timeout=busy_timeout_s, hide_parameters=True, **opened
    )
    event.listen(reader, "connect", connected((*common, "query_only=ON")))
    event.listen(reader, "begin", begin_read)
    event.listen(reader, "checkout", checked_out)
    return reader, writer


def _identity(file: str) -> tuple[int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open_read_only(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(read_only_uri(file), uri=True, check_same_thread=False)


def _mysql_engine(
    url: URL, busy_timeout_s: float, *, isolation_level: str, answer_timeout_s: float | None = None
) -> Engine:
    timeout_s = answer_timeout_s or ANSWER_TIMEOUT_S

    def failed(context: ExceptionContext) -> None:
        if is_not_primary(context.original_exception):
            context.is_disconnect = True  # pooled connections would keep reaching that server

    engine = create_engine(
        url,
        isolation_level=isolation_level,
        pool_pre_ping=True,
        pool_recycle=1800,
        pool_size=4,
        max_overflow=12,
        pool_timeout=busy_timeout_s,
        hide_parameters=True,
        connect_args={
            "charset": "utf8mb4",
            "connect_timeout": int(CONNECT_TIMEOUT_S),
            "read_timeout": timeout_s,
            "write_timeout": timeout_s,
            # Without intersections: for the newest rows of two common values they read all entries of both.
            "init_command": "SET SESSION sql_mode='STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
            "optimizer_switch='index_merge_intersection=off', "
            f"innodb_lock_wait_timeout={int(busy_timeout_s)}",
        },
    )

    def connected(connection: Any, _record: object) -> None:  # noqa: ANN401 - a DBAPI connection has no type
        connection.encoding = MYSQL_ENCODING

    event.listen(engine, "handle_error", failed)
    event.listen(engine, "connect", connected)
    return engine


# --- turns of SQLite's writers ---------------------------------------------------------------------------------------

# SQLite's lock has no queue: waiters poll with pauses that grow to 0.1 s. A process that writes continually leaves only
# microseconds between its transactions, so others could wait for seconds, longer than a controller's lease. Therefore
# a writer locks a file beside the database while it waits to begin. The next transaction of the present writer needs
# that lock too, and cannot overtake the one that has been waiting.

TURN_POLL_MS = 1


def begin_immediate(connection: Connection, path: str, *, timeout_s: float) -> None:
    """Begin a write transaction on the database at `path`, in turn with other processes.

    Raises what BEGIN IMMEDIATE raises, for example that the database is still locked after `timeout_s`.
    """
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    deadline_s = time.monotonic() + timeout_s
    driver.execute(f"PRAGMA busy_timeout={TURN_POLL_MS}").fetchall()
    try:
        with _turn(f"{path}-turn", deadline_s):
            while time.monotonic() < deadline_s:
                try:
                    driver.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.Error as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                        break
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # raises SQLAlchemy's errors, like all other statements
    finally:
        driver.execute(f"PRAGMA busy_timeout={int(timeout_s * 1000)}").fetchall()


@contextmanager
def _turn(path: str, deadline_s: float) -> Iterator[None]:
    """Hold the turn for the block. Proceed without it after the deadline, or if the file or the lock is impossible:
    SQLite's own lock protects the data."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it if its holder dies
                break
            except BlockingIOError:
                time.sleep(TURN_POLL_MS / 1000)
            except OSError:
                break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would leave the lock to a child forked meanwhile
        os.close(descriptor)
