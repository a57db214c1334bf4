"""The rows of a cluster in which small jobs run, and of the history behind them: a year of it, or none."""

from __future__ import annotations

from api_bench import rows
from api_bench.rows import Rows, host, job
from sqlalchemy import Table

from flyball.contracts.cluster import JobSpec
from flyball.contracts.events import Event, EventKind
from services.record.codec import dump
from services.store.sql import tables

JOBS = 100  # that run, on one host each
HOSTS = 2000
YEAR_S = 365 * 86_400.0
COUNTS = {  # of a year
    tables.events: 1_560_000,
    tables.signals: 262_000,
    tables.commands: 130_000,
    tables.decisions: 30_000,
    tables.incidents: 10_000,
    tables.audit_entries: 20_000,
    tables.jobs: 220,
}
OF_NO_JOB = 35  # every so many events, signals and decisions are about a host alone
SECONDS_EACH = 10  # that an event of steps covers


def all_rows(years: float, now: float) -> list[tuple[Table, int, Rows]]:
    """Return (table, number of rows, rows), in an order that foreign keys allow. The history ends a moment ago."""
    count = {table: int(years * of_a_year) for table, of_a_year in COUNTS.items()}
    began, hosts = now - YEAR_S - 600.0, HOSTS
    audited = count[tables.audit_entries]
    incidents, decisions, signals = (count[table] for table in (tables.incidents, tables.decisions, tables.signals))

    def spread(found: Rows, table_rows: int, *columns: str) -> Rows:
        for number, row in enumerate(found):
            at = began + number * YEAR_S / max(1, table_rows)
            own = row | dict.fromkeys(columns, at)
            if number % OF_NO_JOB == 1 and "job" in own:
                own["job"] = ""
            yield own

    return [
        (tables.hosts, hosts, _hosts(hosts, now)),
        (tables.host_reports, hosts, _reports(hosts, now)),
        (tables.vouches, 1, ({**row, "at": now} for row in rows.vouch_rows(JOBS))),
        (tables.jobs, JOBS + count[tables.jobs], _jobs(count[tables.jobs], began, now)),
        (tables.incidents, incidents, spread(rows.incident_rows(incidents, hosts, JOBS), incidents, "opened_at")),
        (tables.incident_changes, incidents * 4, spread(rows.change_rows(incidents), incidents * 4, "at")),
        (tables.decisions, decisions, spread(rows.decision_rows(decisions, JOBS), decisions, "at")),
        (tables.actions, decisions, spread(rows.action_rows(decisions, JOBS), decisions, "started_at", "ended_at")),
        (tables.action_changes, decisions * 4, spread(_action_changes(decisions * 4), decisions * 4, "at")),
        (tables.commands, count[tables.commands], _commands(count[tables.commands], decisions, hosts, began)),
        (tables.generations, JOBS, rows.generation_rows(JOBS, 1)),
        (tables.signals, signals, spread(rows.signal_rows(signals, hosts, JOBS), signals, "observed_at", "stored_at")),
        (tables.watermarks, hosts, _watermarks(hosts, signals)),
        (tables.audit_entries, audited, spread(rows.audit_rows(audited, hosts), audited, "at", "ended_at")),
        (tables.events, count[tables.events] + JOBS, _events(count[tables.events], began, now)),
    ]


def _hosts(count: int, now: float) -> Rows:
    for number, row in enumerate(rows.host_rows(count, count)):
        lives = number < JOBS
        yield row | {"since": now, "state": "healthy" if lives else "silent", "copies": "[]", "copies_of": "[]"}


def _reports(count: int, now: float) -> Rows:
    for number, row in enumerate(rows.report_rows(count, count)):
        at = now if number < JOBS else now - 86_400.0
        workers = dump({job(number): 1}) if number < JOBS else "{}"
        yield row | {"sent_at": at, "received_at": at, "workers": workers}


def _jobs(ended: int, began: float, now: float) -> Rows:
    for number, row in enumerate(rows.job_rows(JOBS, ended)):
        over = number < ended
        at = began + number * YEAR_S / ended if over else now - 60.0
        spec = JobSpec(str(row["job"]), ("train.py",), "/", nnodes=1, nproc_per_node=rows.RANKS)
        yield row | {"spec": dump(spec), "submitted_at": at, "ended_at": at + 60.0 if over else 0.0}


def _action_changes(count: int) -> Rows:
    for number in range(count):
        row = {"action": number // 4 + 1, "phase": "start", "message": ""}
        yield row | {"state": ("queued", "dispatched", "acknowledged", "succeeded")[number % 4], "at": 0.0}


def _commands(count: int, actions: int, hosts: int, began: float) -> Rows:
    for number in range(count):
        at = began + number * YEAR_S / max(1, count)
        times = {"created_at": at, "dispatched_at": at, "answered_at": at + 1.0}
        yield {
            **{"command_id": f"act-{number}", "action": number * actions // count + 1, "phase": "start"},
            **{"host_id": host(number % hosts), "document": "{}", "is_open": False, "progress": 2, **times},
        }


def _watermarks(hosts: int, signals: int) -> Rows:
    for number in range(hosts):
        yield {"incarnation": f"inc-{number}", "source": host(number), "seq": signals}


def _events(count: int, began: float, now: float) -> Rows:
    """Steps and signals of the jobs in turn, and what concerns no job; then that each job runs."""
    for number in range(1, count + 1):
        at, turn = began + number * YEAR_S / count, number % OF_NO_JOB
        name = "" if turn == 1 else job(number % JOBS)
        if turn == 1:
            event = Event(at, EventKind.HOST_JOINED, host_id=host(number % JOBS))
        elif turn % 6 == 0:
            event = Event(at, EventKind.SIGNAL, name, 1, data={"observed_at": at - 0.1, "kind": "worker_exited"})
        else:
            first = number // JOBS * SECONDS_EACH
            times = [at - SECONDS_EACH + place for place in range(SECONDS_EACH)]
            steps = {"first_step": first, "completed_at": times, "slowest_step": first + SECONDS_EACH - 1, "ranks": 8}
            event = Event(at, EventKind.STEPS, name, 1, data={**steps, "sensor": "s", "save_blocked_s": 0.1 * number})
        yield {"number": number, "at": at, "kind": event.kind.value, "job": name, "document": dump(event)}
    for number in range(JOBS):
        event = Event(now - 60.0, EventKind.GENERATION_STARTED, job(number), 1, data={"world_size": rows.RANKS})
        row = {"number": count + 1 + number, "at": event.at, "kind": event.kind.value, "job": event.job}
        yield row | {"document": dump(event)}
