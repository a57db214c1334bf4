"""A database of the first release goes through every later revision; the real stores read it and continue."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, text

from flyball.cli.main import run_cli
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import StateVersionMismatch
from flyball.contracts.events import EventKind
from flyball.contracts.reports.drains import DrainState
from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.controller.loop import ControllerLoop
from services.controller.round.view import PolicySettings
from services.runtime.wakeup import LocalWakeup
from services.store.read.read_models import SqlReadModels
from services.store.sql.copying import copy_database
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import MIGRATIONS, check, migrate
from services.store.sql.tables import metadata

FIRST_RELEASE = "0100"
# All rows that release 0.1.0 wrote about one job: by its controller's loop, executor and stores, in a database of
# revision 0100, after its lease ran out. Never regenerate it: later releases write differently, and must read this.
# The job was restarted once; its second restart waits for hosts to stop; one signal has not been read yet.
DUMP = Path(__file__).parent / "first_release.json"

Rows = dict[str, list[dict[str, object]]]


def _upgrade(connection: Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _tables(connection: Connection) -> MetaData:
    """The tables as they are in this database, whatever the code says."""
    tables = MetaData()
    tables.reflect(connection, only=lambda name, _: name != "alembic_version")
    return tables


def _rows(connection: Connection, table: str) -> list[dict[str, object]]:
    return [dict(row) for row in connection.execute(text(f"SELECT * FROM {table}")).mappings()]


def _one_of_each(connection: Connection) -> None:
    """Insert one row into every table."""
    values = {int: 7, float: 7.5, Decimal: 7.5, str: "7", bytes: b"7", bool: True}
    for table in _tables(connection).sorted_tables:
        connection.execute(table.insert().values({c.name: values[c.type.python_type] for c in table.columns}))


def _dumped(connection: Connection) -> None:
    rows = json.loads(DUMP.read_text(), object_hook=_bytes)
    for table in _tables(connection).sorted_tables:
        connection.execute(table.delete())
        if table.name in rows:
            connection.execute(table.insert(), rows[table.name])


def _bytes(found: dict[str, object]) -> object:
    return base64.b64decode(str(found["base64"])) if found.keys() == {"base64"} else found


@pytest.mark.parametrize("fill", [_one_of_each, _dumped])
def test_a_database_of_the_first_release_keeps_its_rows(database_url: str, fill: Callable[[Connection], None]) -> None:
    """A revision that renames or drops a column must state here what becomes of it."""
    db = Database(database_url)
    with db.write() as connection:
        _upgrade(connection, FIRST_RELEASE)
        fill(connection)
        before: Rows = {name: _rows(connection, name) for name in _tables(connection).tables}
    migrate(db)
    with db.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        for name, rows in before.items():
            now = _rows(connection, name)
            assert [{key: row[key] for key in old} for row, old in zip(now, rows, strict=True)] == rows, name
    db.close()


@pytest.fixture
def upgraded(database_url: str) -> Iterator[Database]:
    """The dump, upgraded to this release's schema."""
    db = Database(database_url)
    with db.write() as connection:
        _upgrade(connection, FIRST_RELEASE)
        _dumped(connection)
    migrate(db)
    yield db
    db.close()


def test_what_the_first_release_wrote_is_read(upgraded: Database, stores_in, clock) -> None:  # type: ignore[no-untyped-def]
    stores = stores_in(upgraded)
    view = stores.decisions.load_view()
    (job,), (incident,) = view.jobs, view.incidents
    assert (job.state, job.generation.generation) == (JobState.RUNNING, 3)
    assert (incident.incident_id, incident.action_id, incident.failed_step) == ("inc-1", "act-4", 9)
    assert view.next_decision == 5
    drain = next(host.drain for host in view.hosts if host.host_id == "host-c")
    assert drain is not None and (drain.state, drain.reason) == (DrainState.REQUESTED, "new fans")
    assert [action.plan.generation for action in stores.actions.open_actions()] == [2]
    assert [one.command_id for one in stores.actions.commands_for("host-b", clock.wall_s())] == ["act-4.stop.host-b.1"]
    kinds = stores.kinds()
    assert (len(kinds), kinds[0], kinds[-1]) == (20, EventKind.JOB_SUBMITTED, EventKind.GENERATION_GRANTED)

    shown = SqlReadModels(upgraded)
    assert (shown.job("job")["newest_step"], shown.checkpoints("job")["recovery_point"]) == (9, 5)
    kinds = sorted(one["kind"] for one in shown.decisions(None))
    assert kinds == ["cordon", "restart_in_place", "restart_in_place", "start_job"]


def test_what_the_first_release_began_is_ended(upgraded: Database, stores_in, clock, make) -> None:  # type: ignore[no-untyped-def]
    """Another controller leads, continues where the last one was, and carries the restart on to its start. No host
    lists a copy when it stops its ranks, so those that start them look for copies first."""
    stores = stores_in(upgraded)
    clock.now_s = 1_003.0
    bus, wakeup = EmbeddedBus(upgraded), LocalWakeup()
    loop = ControllerLoop(
        store=stores.decisions, bus=bus, wakeup=wakeup, clock=clock, settings=PolicySettings(), holder="c#2"
    )
    executor = Executor(store=stores.actions, wakeup=wakeup, clock=clock)
    before = stores.decisions.cursor()
    loop.run_once()
    assert stores.decisions.cursor().position == before.position + 1
    for _ in ("stop", "list"):
        for host in ("host-a", "host-b"):
            for handed in stores.actions.commands_for(host, clock.now_s):
                stores.actions.record(make.update(handed.command_id))
        executor.run_once()
    (handed,) = stores.actions.commands_for("host-a", clock.now_s)
    assert handed.command_id == "act-4.start.host-a.1" and handed.fence.generation == 3


def _check(db: Database) -> None:
    with db.read() as connection:
        check(connection, db.name)


@pytest.fixture
def from_before(db: Database) -> Database:
    """A database from before the first release."""
    with db.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0015'"))
    return db


@pytest.mark.parametrize("use", ["start", "read", "copy"])
def test_a_database_from_before_the_first_release_is_refused_with_the_next_step(
    from_before: Database, new_database_url: Callable[[str], str], use: str
) -> None:
    target = Database(new_database_url("sqlite"))
    uses: dict[str, Callable[[], object]] = {
        "start": lambda: migrate(from_before),
        "read": lambda: _check(from_before),
        "copy": lambda: copy_database(from_before, target),
    }
    with pytest.raises(StateVersionMismatch, match="has schema 0015, from before the first release") as caught:
        uses[use]()
    assert "start with an empty database" in caught.value.hint
    target.close()


def test_a_command_says_so_in_two_lines(
    from_before: Database, new_database_url: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = from_before.url.render_as_string(hide_password=False)
    assert run_cli(["db", "copy", url, new_database_url("sqlite")]) == 5
    printed = capsys.readouterr().err
    assert "from before the first release" in printed and "empty database" in printed and "Traceback" not in printed
