"""Measures how fast the lists of the API are in a large database: p50 and p99 of each, with and without filters, and
beside them the floor: a request that reads no database. What a job would lose is no list, but is read as often.

    python benchmarks/api.py                                 10,000 hosts and a million signals, SQLite
    python benchmarks/api.py --database mysql://root@127.0.0.1:3306/flyball_bench
    python benchmarks/api.py --quick                         500 hosts and 20,000 signals, a quick check

The requests go through the whole application, without a network. SQLite is in a temporary folder. Another database
must be empty; its tables are dropped at the end. `--keep` leaves it as it is, and measures one that was kept without
filling it again. Run it on an otherwise idle machine; on a busy one the processor time of this process (`cpu_...`,
without a database server's) says more than the time that passed.

Exit codes: 0 for success, 1 if the p99 of a request is above --limit-ms, 2 for a database that is not the benchmark's.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402 - the line above makes the rest importable
import structlog  # noqa: E402
from api_bench.database import drop, prepare  # noqa: E402
from api_bench.rows import START_AT, host  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from flyball.contracts.clock import SystemClock  # noqa: E402
from flyball.contracts.errors import Conflict  # noqa: E402
from services.api.app import create_app  # noqa: E402
from services.assembly import Assembly  # noqa: E402
from services.rules.engine_keys import EngineKeyring  # noqa: E402
from services.rules.grant_seals import GrantSeals  # noqa: E402
from services.runtime.claim import PARTS  # noqa: E402
from services.runtime.health import Health  # noqa: E402
from services.runtime.http.auth import Authenticator  # noqa: E402
from services.runtime.process import favour_event_loop  # noqa: E402
from services.settings import Settings  # noqa: E402

SECRET = "only-for-the-benchmark"
FLOOR = "/healthz"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="500 hosts, 20,000 signals, 20 requests of each list")
    parser.add_argument("--database", default="", help="URL of an empty database (SQLite in a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="keep --database filled; measure one that was kept")
    parser.add_argument("--hosts", type=int, help="number of hosts, each with 8 ranks (10000)")
    parser.add_argument("--signals", type=int, help="number of signals and of events (1000000)")
    parser.add_argument("--requests", type=int, help="number of requests of each list (200)")
    parser.add_argument("--limit-ms", type=float, default=100.0, help="the p99 that is good enough (100)")
    wanted = parser.parse_args()
    if wanted.keep and not wanted.database:
        parser.error("--keep needs --database: without it the database is in a temporary folder")
    for name, quick, whole in (("hosts", 500, 10_000), ("signals", 20_000, 1_000_000), ("requests", 20, 200)):
        if getattr(wanted, name) is None:
            setattr(wanted, name, quick if wanted.quick else whole)
    return wanted


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
        *("/v1/jobs/gpt-0", "/v1/jobs/gpt-0/recoverability", "/v1/checkpoints?job=gpt-0&copies=false"),
        *("/v1/jobs?limit=50", "/v1/jobs?state=failed", "/v1/jobs?open=true&limit=1"),
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
            "/v1/signals?kind=rank_stalled",  # there is none
            f"/v1/signals?since={late}",
            f"/v1/signals?before=sig-{signals // 2}",
        ),
        *("/v1/orders", "/v1/audit", f"/v1/audit?target={host(7)}"),
        *("/v1/events?limit=200", "/v1/events?newest=true&limit=200&job=gpt-0"),
        *("/v1/events?newest=true&limit=200&kind=fault_injected", f"/v1/events?since={late}&limit=200"),
        *("/v1/events?kind=host_joined", "/v1/events?job=gpt-0&kind=host_joined&kind=restored"),  # there are none
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
            figures |= {"cpu_p50_ms": cpu_spread[49], "cpu_p99_ms": cpu_spread[98], "load_1m": os.getloadavg()[0]}
            found[path] = {name: round(value, 2) for name, value in figures.items()}
            print(f"{path}: {found[path]}", file=sys.stderr)
    return found


def main() -> int:
    wanted = parse()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # stdout is for figures
    favour_event_loop(SystemClock())  # as a service does: full collections of garbage would be the slowest requests
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(state_dir=Path(folder), database_url=wanted.database, max_requests_per_s=0.0)
        assembly = Assembly(
            settings, frozenset(PARTS), SystemClock(), GrantSeals("a benchmark"), EngineKeyring("a benchmark")
        )
        try:
            prepare(assembly.db, wanted.hosts, wanted.signals, keeps=wanted.keep)
            try:
                assembly.build()
                lists = asyncio.run(measure(assembly, wanted))
            finally:
                if not wanted.keep:
                    drop(assembly.db)
        except Conflict as error:
            print(f"{error.message} Next step: {error.hint}.", file=sys.stderr)
            return 2
        finally:
            assembly.close()
    floor = lists.pop(FLOOR)
    slow = sorted(path for path, figures in lists.items() if figures["p99_ms"] > wanted.limit_ms)
    result = {
        **{"hosts": wanted.hosts, "signals": wanted.signals, "requests_each": wanted.requests},
        **{"database": "sqlite" if assembly.db.is_sqlite else "mysql", "load_1m": [load_before, os.getloadavg()[0]]},
        **{"limit_ms": wanted.limit_ms, "slow": slow, "floor": floor, "lists": lists},
    }
    if wanted.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 1 if slow else 0


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['database']}, {result['requests_each']} requests each, milliseconds")
    table.add_column("request", overflow="fold")
    for heading in ("items", "p50", "p99", "CPU p50", "CPU p99", "load"):
        table.add_column(heading, justify="right")
    for path, figures in ({FLOOR: result["floor"]} | result["lists"]).items():
        times = [f"{figures[name]:.1f}" for name in ("p50_ms", "p99_ms", "cpu_p50_ms", "cpu_p99_ms", "load_1m")]
        table.add_row(path, f"{figures['items']:.0f}", *times, style="red" if path in result["slow"] else None)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    missed = f"above {result['limit_ms']:g} ms at p99: {', '.join(result['slow'])}"
    console.print(missed if result["slow"] else f"All requests are below {result['limit_ms']:g} ms at p99.")


if __name__ == "__main__":
    sys.exit(main())
