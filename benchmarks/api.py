"""Measures how fast the lists of the API are in a large database: p50 and p99 of each, with and without filters, and
beside them the floor: a request that reads no database. What a job would lose is no list, but is read as often.

    python benchmarks/api.py --json                          10,000 hosts and a million signals, SQLite
    python benchmarks/api.py --database mysql://root@127.0.0.1:3306/flyball_bench
    python benchmarks/api.py --quick                         500 hosts and 20,000 signals, a quick check

The requests go through the whole application, without a network. SQLite is in a temporary folder. Another database
must be empty; its tables are dropped at the end. Run it on an otherwise idle machine; on a busy one the processor time
of this process (`cpu_...`, without a database server's) says more than the time that passed.

Exit codes: 0 for success, 1 if the p99 of a list is above --limit-ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402 - the line above makes the rest importable
import structlog  # noqa: E402
from sqlalchemy import Table, insert, text  # noqa: E402

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier  # noqa: E402
from flyball.contracts.clock import SystemClock  # noqa: E402
from flyball.contracts.cluster import HostRanks, JobSpec, Phase  # noqa: E402
from flyball.contracts.decisions import (  # noqa: E402
    ActionPlan,
    Decision,
    DecisionKind,
    GenerationPlan,
    Incident,
    IncidentState,
)
from flyball.contracts.events import Event, EventKind  # noqa: E402
from flyball.contracts.reports.signals import EngineStatus, Signal, WorkerExited  # noqa: E402
from services.api.app import create_app  # noqa: E402
from services.assembly import Assembly  # noqa: E402
from services.record.codec import dump  # noqa: E402
from services.record.positions import JobPositions, ReportedPosition  # noqa: E402
from services.runtime.claim import PARTS  # noqa: E402
from services.runtime.health import Health  # noqa: E402
from services.runtime.http.auth import Authenticator  # noqa: E402
from services.settings import Settings  # noqa: E402
from services.store.sql import tables  # noqa: E402
from services.store.sql.database import Database  # noqa: E402
from services.store.sql.schema_upgrade import migrate  # noqa: E402

SECRET = "only-for-the-benchmark"
START_AT = 1_700_000_000.0
ROWS_AT_ONCE = 5000
HOSTS_PER_JOB = 1250
RANKS = 8
STEPS = (8, 9)  # of which each host has copies
RARE = 1000  # every so many signals is of another kind
Rows = Iterator[dict[str, Any]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="500 hosts, 20,000 signals, 20 requests of each list")
    parser.add_argument("--database", default="", help="URL of an empty database (SQLite in a temporary folder)")
    parser.add_argument("--hosts", type=int, help="number of hosts, each with 8 ranks (10000)")
    parser.add_argument("--signals", type=int, help="number of signals and of events (1000000)")
    parser.add_argument("--requests", type=int, help="number of requests of each list (200)")
    parser.add_argument("--limit-ms", type=float, default=100.0, help="the p99 that is good enough (100)")
    wanted = parser.parse_args()
    for name, quick, whole in (("hosts", 500, 10_000), ("signals", 20_000, 1_000_000), ("requests", 20, 200)):
        if getattr(wanted, name) is None:
            setattr(wanted, name, quick if wanted.quick else whole)
    return wanted


# --- the database ----------------------------------------------------------------------------------------------------


def fill(db: Database, hosts: int, signals: int) -> None:
    jobs = max(1, hosts // HOSTS_PER_JOB)
    incidents = max(10, signals // 100)
    for table, rows in (
        (tables.hosts, host_rows(hosts, jobs)),
        (tables.host_reports, report_rows(hosts, jobs)),
        (tables.vouches, vouch_rows(hosts)),
        (tables.jobs, job_rows(jobs, ended=hosts // 5)),
        (tables.generations, generation_rows(jobs, hosts // jobs)),
        (tables.signals, signal_rows(signals, hosts, jobs)),
        (tables.incidents, incident_rows(incidents, hosts, jobs)),
        (tables.incident_changes, change_rows(incidents)),
        (tables.decisions, decision_rows(incidents, jobs)),
        (tables.actions, action_rows(incidents, jobs)),
        (tables.audit_entries, audit_rows(incidents, hosts)),
        (tables.events, event_rows(signals, jobs)),
    ):
        write(db, table, rows)
    with db.write() as connection:
        connection.execute(tables.log_head.update().values(last_event=signals, revision=signals))


def write(db: Database, table: Table, rows: Rows) -> None:
    began_s = time.monotonic()
    count = 0
    while part := list(islice(rows, ROWS_AT_ONCE)):
        with db.write(durable=False) as connection:
            connection.execute(insert(table), part)
        count += len(part)
    print(f"{table.name}: {count:,} rows in {time.monotonic() - began_s:.1f} s", file=sys.stderr)


def host_rows(count: int, jobs: int) -> Rows:
    engine = dump(EngineStatus(alive=True, counters={"peer_bytes_sent": 1 << 40, "disk_bytes_written": 1 << 40}))
    for number in range(count):
        yield {
            **{"host_id": host(number), "state": "silent" if number % RARE == 0 else "healthy", "since": START_AT},
            **{"reason": "", "preempt_deadline_at": 0.0, "joined_at": START_AT, "left_at": 0.0},
            **{"address": "10.0.0.1", "failure_domain": f"rack-{number // 32}", "engine_address": "10.0.0.1:7371"},
            **{"free_port": 29_500, "daemon_version": "0.1.0", "pid": 1, "interval_s": 1.0, "engine": engine},
            **{"copies": dump(copies_on(number, count // jobs)), "version": number},
            "copies_of": dump([job(number // (count // jobs))]),
        }


def copies_on(number: int, hosts_each: int) -> list[ShardCopy]:
    """Two steps of each rank of the host, and of each rank of the next host of its job."""
    place = number % hosts_each
    name = job(number // hosts_each)
    return [
        ShardCopy(name, 1, step, rank, tier, host(number), 2 << 30, f"{step:016x}{rank:016x}")
        for tier, of in ((Tier.MEMORY, place), (Tier.PEER, (place + 1) % hosts_each))
        for step in STEPS
        for rank in range(of * RANKS, (of + 1) * RANKS)
    ]


def vouch_rows(count: int) -> Rows:
    names = dump([host(number) for number in range(count)])
    yield {
        "sensor": "sensor-1",
        "at": START_AT,
        "hosts": names,
        "ages_ms": dump([number % 1000 for number in range(count)]),
    }


def report_rows(count: int, jobs: int) -> Rows:
    hosts_each = count // jobs
    for number in range(count):
        first = number % hosts_each * RANKS
        of_ranks = [ReportedPosition(first + rank, 4000 + rank, 9, Phase.STEP, START_AT) for rank in range(RANKS)]
        positions = [JobPositions(job(number // hosts_each), 1, tuple(of_ranks))]
        times = {"sent_at": START_AT, "received_at": START_AT}
        names = {"host_id": host(number), "incarnation": f"inc-{number}", "digest": ""}
        yield {**names, **times, "workers": "{}", "positions": dump(positions), "version": number}


def job_rows(running: int, ended: int) -> Rows:
    for number in range(running + ended):
        runs = number >= ended
        name = job(number - ended) if runs else f"old-{number}"
        spec = JobSpec(name, ("train.py",), "/", nnodes=HOSTS_PER_JOB, nproc_per_node=RANKS)
        yield {
            **{"job": name, "spec": dump(spec), "state": "running" if runs else "failed" if number % 2 else "stopped"},
            **{"message": "", "submitted_at": START_AT + number, "ended_at": 0.0 if runs else START_AT + number + 9.0},
            **{"stop_requested": False, "newest_step": 9, "generation": 1 if runs else -1, "run": "", "loss": ""},
            **{"loss_step": -1},
        }


def generation_rows(jobs: int, hosts_each: int) -> Rows:
    for number in range(jobs):
        ranks = iter(range(hosts_each * RANKS))
        hosts = tuple(
            HostRanks(host(number * hosts_each + place), "10.0.0.1", "10.0.0.1:7371", tuple(islice(ranks, RANKS)))
            for place in range(hosts_each)
        )
        plan = GenerationPlan(job(number), 1, None, hosts, {}, (), 0)
        row = {"job": job(number), "generation": 1, "decision": 1, "plan": dump(plan)}
        lineage = dump((LineageEntry(1, None),))
        yield {**row, "granted_at": START_AT, "started_at": START_AT, "lineage": lineage}


def signal_rows(count: int, hosts: int, jobs: int) -> Rows:
    for number in range(1, count + 1):
        about, name, at = host(number % hosts), job(number % jobs), START_AT + number
        body = WorkerExited(job=name, generation=1, rank=0, pid=1, exit_code=1, signal_number=None, last_step=9)
        yield {
            **{"number": number, "source": about, "incarnation": f"inc-{number % hosts}", "seq": number},
            **{"kind": "host_silent" if number % RARE == 0 else "worker_exited", "job": name, "generation": 1},
            **{"host_id": about, "observed_at": at, "stored_at": at},
            **{"document": dump(Signal(about, f"inc-{number % hosts}", number, at, body))},
        }


def incident_rows(count: int, hosts: int, jobs: int) -> Rows:
    for number in range(1, count + 1):
        name, about, at = job(number % jobs), host(number % hosts), START_AT + number * 100.0
        cause = "host_silent" if number % 100 == 0 else "worker_killed"
        state = IncidentState.ESCALATED if number % 50 == 0 else IncidentState.RESOLVED
        one = Incident(
            f"inc-{number}", name, about, cause, state, at, at + 9.0, "", 1, observed_at=at, resolved_at=at + 9.0
        )
        yield {
            **{"number": number, "job": name, "state": state.value, "closed": True, "decided_at": at, "host_id": about},
            **{"cause": cause, "opened_at": at, "document": dump(one)},
        }


def change_rows(incidents: int) -> Rows:
    for number in range(incidents * 4):
        states = ("open", "acting", "verifying", "resolved")
        row = {"incident": number // 4 + 1, "at": START_AT + number, "state": states[number % 4]}
        yield {**row, "cause": "worker_killed", "message": ""}


def decision_rows(count: int, jobs: int) -> Rows:
    for number in range(1, count + 1):
        name, at = job(number % jobs), START_AT + number * 100.0
        kind = DecisionKind.MIGRATE_TO_SPARE if number % 100 == 0 else DecisionKind.RESTART_IN_PLACE
        one = Decision(f"dec-{number}", f"inc-{number}", name, kind, "A rank was killed.", kind.value, at)
        row = {"number": number, "incident": number, "job": name, "kind": kind.value, "at": at, "epoch": 1}
        yield {**row, "document": dump(one)}


def action_rows(count: int, jobs: int) -> Rows:
    for number in range(1, count + 1):
        name, at = job(number % jobs), START_AT + number * 100.0
        spec = JobSpec(name, ("train.py",), "/")
        plan = ActionPlan(DecisionKind.RESTART_IN_PLACE, name, spec, 1)
        yield {
            **{"number": number, "incident": number, "job": name, "plan": dump(plan), "ended": True, "phase": "start"},
            **{"state": "failed" if number % 100 == 0 else "succeeded", "attempt": 1, "version": 1, "message": ""},
            **{"started_at": at, "ended_at": at + 5.0},
        }


def audit_rows(count: int, hosts: int) -> Rows:
    for number in range(1, count + 1):
        row = {"number": number, "at": START_AT + number, "ended_at": START_AT + number, "role": "operator"}
        row |= {"token": "3f9a01c2", "client": "10.0.0.5", "target": host(number % hosts), "status": 202, "code": ""}
        yield {**row, "operation": "drainHost", "idempotency_key": "", "claim": 0, "detail": "{}"}


def event_rows(count: int, jobs: int) -> Rows:
    for number in range(1, count + 1):
        kind = EventKind.FAULT_INJECTED if number % RARE == 0 else EventKind.STEPS
        event = Event(
            START_AT + number, kind, job(number % jobs), 1, data={"first_step": number, "completed_at": [1.0]}
        )
        row = {"number": number, "at": event.at, "kind": kind.value, "job": event.job}
        yield {**row, "document": dump(event)}


def host(number: int) -> str:
    return f"node-{number:05}"


def job(number: int) -> str:
    return f"gpt-{number}"


# --- the requests ----------------------------------------------------------------------------------------------------


FLOOR = "/healthz"


def paths(hosts: int, signals: int) -> list[str]:
    late = START_AT + signals * 0.99
    return [
        *(
            "/v1/host-map",
            "/v1/hosts?limit=200",
            "/v1/hosts?state=silent",
            "/v1/hosts?job=gpt-0",
            "/v1/hosts?failure_domain=rack-3",
        ),
        *("/v1/jobs/gpt-0/recoverability", "/v1/jobs?limit=50", "/v1/jobs?state=failed", "/v1/jobs?open=true&limit=1"),
        *("/v1/incidents?limit=50", "/v1/incidents?job=gpt-0&limit=50", "/v1/incidents?cause=host_silent&limit=50"),
        *(f"/v1/incidents?host={host(hosts // 2)}", "/v1/incidents?state=escalated&limit=50"),
        *(
            "/v1/decisions",
            "/v1/decisions?kind=migrate_to_spare",
            "/v1/decisions?job=gpt-0",
            "/v1/decisions?incident=inc-5",
        ),
        *("/v1/actions", "/v1/actions?state=failed", "/v1/actions?job=gpt-0"),
        *("/v1/signals", "/v1/signals?kind=host_silent", "/v1/signals?job=gpt-0", f"/v1/signals?host={host(7)}"),
        *(
            "/v1/signals?job=gpt-0&kind=host_silent",
            f"/v1/signals?since={late}",
            f"/v1/signals?before=sig-{signals // 2}",
        ),
        *("/v1/orders", "/v1/audit", f"/v1/audit?target={host(7)}"),
        *("/v1/events?limit=200", "/v1/events?newest=true&limit=200&job=gpt-0"),
        *("/v1/events?newest=true&limit=200&kind=fault_injected", f"/v1/events?since={late}&limit=200"),
    ]


async def measure(assembly: Assembly, wanted: argparse.Namespace) -> dict[str, dict[str, float]]:
    health = Health(loops=(), checks={}, clock=SystemClock())
    app = create_app(assembly.dependencies(Authenticator(SECRET), health))
    found: dict[str, dict[str, float]] = {}
    headers = {"Authorization": f"Bearer {SECRET}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://in.process", headers=headers) as client:
        for path in (FLOOR, *paths(wanted.hosts, wanted.signals)):
            times_ms, cpu_ms, items = [], [], 0
            for _ in range(wanted.requests + 1):
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                response = await client.get(path, timeout=60.0)
                times_ms.append((time.perf_counter() - began_s) * 1000.0)
                cpu_ms.append((time.process_time() - began_cpu_s) * 1000.0)
                response.raise_for_status()
                items = len(response.json().get("items", ()))
            spread = statistics.quantiles(times_ms[1:], n=100, method="inclusive")
            cpu_spread = statistics.quantiles(cpu_ms[1:], n=100, method="inclusive")
            figures = {"items": items, "p50_ms": spread[49], "p99_ms": spread[98], "first_ms": times_ms[0]}
            figures |= {"cpu_p50_ms": cpu_spread[49], "cpu_p99_ms": cpu_spread[98]}
            found[path] = {name: round(value, 2) for name, value in figures.items()}
            print(f"{path}: {found[path]}", file=sys.stderr)
    return found


def main() -> int:
    wanted = parse()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # stdout is for figures
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(state_dir=Path(folder), database_url=wanted.database, max_requests_per_s=0.0)
        assembly = Assembly(settings, frozenset(PARTS), SystemClock())
        try:
            migrate(assembly.db)
            fill(assembly.db, wanted.hosts, wanted.signals)
            assembly.build()
            lists = asyncio.run(measure(assembly, wanted))
        finally:
            if wanted.database:
                _drop(assembly.db)
            assembly.close()
    floor = lists.pop(FLOOR)
    slow = sorted(path for path, figures in lists.items() if figures["p99_ms"] > wanted.limit_ms)
    result = {
        **{"hosts": wanted.hosts, "signals": wanted.signals, "requests_each": wanted.requests},
        **{"database": "sqlite" if not wanted.database else "mysql", "load_1m": [load_before, os.getloadavg()[0]]},
        **{"limit_ms": wanted.limit_ms, "slow": slow, "floor": floor, "lists": lists},
    }
    if wanted.json:
        print(json.dumps(result, indent=1))
    else:
        for path, figures in ({FLOOR: floor} | lists).items():
            print(f"{figures['p50_ms']:8.1f} ms {figures['p99_ms']:8.1f} ms (p99)  {path}")
    return 1 if slow else 0


def _drop(db: Database) -> None:
    with db.migration() as connection:
        connection.execute(text("SET foreign_key_checks = 0"))
        for table in (*tables.metadata.sorted_tables, "alembic_version"):
            connection.execute(text(f"DROP TABLE IF EXISTS {table}"))


if __name__ == "__main__":
    sys.exit(main())
