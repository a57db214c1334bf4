"""The supervisor's SQLite is wiped, or a backup of any age takes its place, while a job runs on real daemons: it is
adopted, faults after it are recovered from, and nothing is given out twice."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks.waits import until
from support.servers.stack import PATIENT

from flyball.contracts.clock import SystemClock
from services.store.sql.database import Database
from simulator.database_check import check_database

SETTLED_S = 300.0
BOUND_S = 90.0  # for an incident to be closed
SLEEP = ("/bin/sh", "-c", "exec sleep 100000")  # a worker that shows no steps: its life is all that is watched
# What a worker that shows no steps has to live for, to prove that it is well.
HASTY = {"FLYBALL_POLICY__UNWATCHED_VERIFY_S": "1.0", "FLYBALL_POLICY__ROOT_CAUSE_WINDOW_S": "0.5"}


class OutlivedDatabase:
    """A stack whose database is backed up and put back; its jobs are asked for by what the daemons wrote down."""

    def __init__(self, make_stack: Any) -> None:  # noqa: ANN401 - a fixture
        self.stack = make_stack(**PATIENT, **HASTY)
        self.stack.start_supervisor()
        self.stack.add_hosts("host-a", "host-b", "host-c")
        self.file: Path = self.stack.root / "flyball.sqlite"

    def submit(self, name: str) -> None:
        job = self.stack.job(name, 2)
        self.stack.submit(job, {"argv": SLEEP, "program": True, "nnodes": 2, "nproc_per_node": 1, "max_restarts": 100})

    def workers(self, name: str) -> dict[str, tuple[int, int]]:
        """host -> (generation, pid) of the job's live workers, by what the daemons wrote down."""
        found = {}
        for host_id, host in self.stack.hosts.items():
            with sqlite3.connect(f"file:{host.state_dir / 'daemon.sqlite'}?mode=ro", uri=True) as connection:
                rows = connection.execute(
                    "SELECT generation, pid FROM workers WHERE job = ? AND rank >= 0 AND ended = 0", (name,)
                ).fetchall()
            if rows:
                found[host_id] = max(rows)
        return found

    def run_on(self, name: str, generation: int) -> dict[str, tuple[int, int]]:
        """Wait until the job runs whole in this generation, and the supervisor says so."""

        def is_whole() -> dict[str, tuple[int, int]] | None:
            self.stack.check()
            found = self.workers(name)
            if [g for g, _ in found.values()] != [generation] * 2:
                return None
            shown = {job["job"]: job for job in self.stack.api.items("/v1/jobs")}
            is_known = name in shown and shown[name]["generation"] == generation
            return found if is_known and not self.open_incidents(name) else None

        try:
            return until(is_whole, f"generation {generation} of {name}", SETTLED_S)
        except AssertionError as error:
            told = [f"{d['decision_id']} {d['job']} {d['rule']}: {d['reason']}" for d in self.decisions()]
            incidents = [f"{i['incident_id']} {i['job']} {i['cause']} {i['state']}" for i in self.incidents()]
            raise AssertionError("\n".join([str(error), str(self.workers(name)), *incidents, *told])) from error

    def open_incidents(self, job: str) -> list[dict[str, Any]]:
        closed = ("resolved", "escalated")
        return [i for i in self.incidents() if i["job"] in (job, "") and i["state"] not in closed]

    def incidents(self) -> list[dict[str, Any]]:
        return list(self.stack.api.items("/v1/incidents"))

    def decisions(self) -> list[dict[str, Any]]:
        return list(self.stack.api.items("/v1/decisions"))

    def kill_one(self, name: str) -> None:
        _, pid = sorted(self.workers(name).items())[0][1]
        os.kill(pid, signal.SIGKILL)

    def stop(self, name: str) -> None:
        self.stack.api.post(f"/v1/jobs/{name}/stop", {})
        until(lambda: not self.workers(name), f"the end of {name}", SETTLED_S)

    def back_up(self, path: Path) -> None:
        with sqlite3.connect(self.file) as source, sqlite3.connect(path) as target:
            source.backup(target)

    def restore(self, backup: Path | None) -> None:
        """Put a backup, or nothing, in the place of the database, as after the loss of the machine."""
        self.stack.supervisor.kill()
        for path in self.stack.root.glob("flyball.sqlite*"):
            path.unlink()
        if backup is not None:
            self.file.write_bytes(backup.read_bytes())
        self.stack.supervisor.start()


@pytest.fixture(scope="module")
def outlived(make_stack: Any) -> Iterator[OutlivedDatabase]:  # noqa: ANN401
    yield OutlivedDatabase(make_stack)


def test_a_wiped_database_adopts_the_job_that_runs(outlived: OutlivedDatabase) -> None:
    outlived.submit("wiped")
    outlived.run_on("wiped", 1)
    outlived.kill_one("wiped")
    before = outlived.run_on("wiped", 2)
    outlived.restore(None)
    assert outlived.run_on("wiped", 2) == before  # nothing was stopped for it
    assert "database_new" in {incident["cause"] for incident in outlived.incidents()}
    outlived.kill_one("wiped")
    outlived.run_on("wiped", 3)
    outlived.stop("wiped")


def test_backups_of_every_age_adopt_the_job_as_it_runs(outlived: OutlivedDatabase, tmp_path: Path) -> None:
    backups = []
    outlived.submit("aged")
    for generation in range(1, 4):
        backups.append(tmp_path / f"before-{generation}.sqlite")
        outlived.back_up(backups[-1])
        outlived.run_on("aged", generation)
        backups.append(tmp_path / f"in-{generation}.sqlite")
        outlived.back_up(backups[-1])
        if generation < 3:
            outlived.kill_one("aged")
    generation = 3
    for backup in backups[::2] + backups[-1:]:  # before each generation, and of the newest
        before = outlived.run_on("aged", generation)
        outlived.restore(backup)
        assert outlived.run_on("aged", generation) == before, backup.name
        outlived.kill_one("aged")
        generation += 1
    outlived.run_on("aged", generation)
    db = Database(f"sqlite:///{outlived.file}")
    assert check_database(db, now=SystemClock().wall_s(), bound_s=BOUND_S) == []
    db.close()
    outlived.stop("aged")


def test_workers_that_died_while_the_database_went_back_are_restarted(
    outlived: OutlivedDatabase, tmp_path: Path
) -> None:
    outlived.submit("died")
    outlived.run_on("died", 1)
    backup = tmp_path / "backup.sqlite"
    outlived.back_up(backup)
    outlived.kill_one("died")
    outlived.run_on("died", 2)
    outlived.stack.supervisor.kill()
    for _, pid in outlived.workers("died").values():
        os.kill(pid, signal.SIGKILL)
    outlived.restore(backup)
    outlived.run_on("died", 3)
    outlived.stop("died")
