"""The rows of a large database: hosts in jobs of 10,000 ranks, and what happened to them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from sqlalchemy import Table

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, JobSpec, Phase
from flyball.contracts.decisions import (
    ActionPlan,
    Decision,
    DecisionKind,
    GenerationPlan,
    Incident,
    IncidentState,
)
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import EngineStatus, Signal, WorkerExited
from services.record.codec import dump
from services.record.positions import JobPositions, ReportedPosition
from services.store.sql import tables

START_AT = 1_700_000_000.0
HOSTS_PER_JOB = 1250
RANKS = 8
STEPS = (8, 9)  # of which each host has copies
RARE = 1000  # every so many signals is of another kind
Rows = Iterator[dict[str, Any]]


def all_rows(hosts: int, signals: int) -> list[tuple[Table, int, Rows]]:
    """Return (table, number of rows, rows), in an order that foreign keys allow."""
    jobs = max(1, hosts // HOSTS_PER_JOB)
    ended = hosts // 5
    incidents = max(10, signals // 100)
    return [
        (tables.hosts, hosts, host_rows(hosts, jobs)),
        (tables.host_reports, hosts, report_rows(hosts, jobs)),
        (tables.vouches, 1, vouch_rows(hosts)),
        (tables.jobs, jobs + ended, job_rows(jobs, ended)),
        (tables.generations, jobs, generation_rows(jobs, hosts // jobs)),
        (tables.signals, signals, signal_rows(signals, hosts, jobs)),
        (tables.incidents, incidents, incident_rows(incidents, hosts, jobs)),
        (tables.incident_changes, incidents * 4, change_rows(incidents)),
        (tables.decisions, incidents, decision_rows(incidents, jobs)),
        (tables.actions, incidents, action_rows(incidents, jobs)),
        (tables.audit_entries, incidents, audit_rows(incidents, hosts)),
        (tables.events, signals, event_rows(signals, jobs)),
    ]


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
