"""The benchmark of the API's lists, at its smallest: every list is measured, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pymysql
import pytest
from support.stores.ready_databases import SERVER

from flyball.contracts.errors import Conflict
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from api_bench.database import prepare

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "api.py"
SIZE = ("--hosts", "16", "--signals", "64", "--requests", "2", "--limit-ms", "1e9")


def measured(*more: str) -> dict[str, object]:
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", *SIZE, *more],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["floor"]["p99_ms"] > 0.0 and found["slow"] == []
    assert {"/v1/host-map", "/v1/incidents?job=gpt-0&limit=50", "/v1/jobs/gpt-0/recoverability"} <= set(found["lists"])
    assert found["lists"]["/v1/incidents?job=gpt-0&limit=50"]["items"] > 0
    return dict(found)


def test_a_kept_database_is_used_again_and_no_other(tmp_path: Path) -> None:
    def prepared(name: str, hosts: int = 16, *, keeps: bool) -> Database:
        db = Database(f"sqlite:///{tmp_path / name}")
        try:
            prepare(db, hosts, 64, keeps=keeps)
        finally:
            db.close()
        return db

    prepared("ours", keeps=True)
    prepared("ours", keeps=True)
    with pytest.raises(Conflict, match="16 hosts, 64 signals"):
        prepared("ours", 32, keeps=True)
    with pytest.raises(Conflict):
        prepared("ours", keeps=False)
    other = Database(f"sqlite:///{tmp_path / 'other'}")
    migrate(other)
    other.close()
    with pytest.raises(Conflict, match="something else"):
        prepared("other", keeps=True)


def test_sqlite() -> None:
    assert measured()["database"] == "sqlite"


def test_a_server_whose_database_is_empty_again_afterwards() -> None:
    try:
        server = pymysql.connect(**SERVER)  # type: ignore[arg-type]
    except pymysql.err.OperationalError as error:
        pytest.skip(f"no MySQL or MariaDB server at 127.0.0.1:3306 ({error})")
    name = f"flyball_bench_{uuid.uuid4().hex[:12]}"
    with server, server.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        try:
            assert measured("--database", f"mysql+pymysql://root@127.0.0.1:3306/{name}")["database"] == "mysql"
            cursor.execute("SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = %s", (name,))
            assert cursor.fetchone() == (0,)
        finally:
            cursor.execute(f"DROP DATABASE {name}")
