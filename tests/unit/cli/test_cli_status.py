"""What `flyball status` shows, and that it fits into a terminal."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.commands.left_runs import left

from flyball.cli.look import status
from flyball.cli.look.hosts_table import print_hosts, print_transports
from flyball.cli.look.jobs_table import hosts_note, job_row, loss_with_step, outcome, save_note
from flyball.cli.look.overview import (
    HEIGHT,
    Overview,
    first_jobs,
    free_hosts,
    next_step,
    resumes_from,
    screen,
    troubled_hosts,
)
from flyball.cli.reach.left_state import LeftState
from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import Incident, IncidentState
from services.record.codec import dump
from services.store.sql import tables
from services.store.sql.database import Database

NOW = 1_795_413_958.0  # 2026-11-23 06:05:58 UTC


def host(number: int, state: str = "healthy", **more: object) -> dict[str, Any]:
    return {
        "host_id": f"host-{number:03}",
        "state": state,
        "since": NOW - 60,
        "job": "llama",
        "last_report_at": NOW - 1,
        "address": f"10.0.0.{number}",
        "failure_domain": "rack-1",
        "reason": "it reported",
    } | more


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def job(name: str = "llama", **more: object) -> dict[str, Any]:
    return {
        **{"job": name, "state": "running", "message": "running on host-001", "hosts": 1, "world_size": 8},
        **{"submitted_at": NOW - 3_700, "started_at": NOW - 3_600, "since": NOW - 3_600, "ended_at": None},
        **{"newest_step": 41, "last_step_at": NOW - 2, "step_s": 0.25, "restart_count": 1, "restarts_used": 1},
        **{"spec": {"max_restarts": 3}, "loss": {"value": 0.5, "step": 40}},
    } | more


def incident(number: int, state: str = "acting", **more: object) -> dict[str, Any]:
    return {
        **{"incident_id": f"inc-{number}", "job": "llama", "host_id": "host-001", "cause": "worker_killed"},
        **{"state": state, "message": "Rank 0 on host-001 was killed. " * 9, "lost_steps": 0, "holding_for": ""},
        **{"since": NOW - 60, "resolved_at": None},
    } | more


def recoverable(step: int, tier: str, after_processes: int | None = None) -> dict[str, Any]:
    rungs = [{"tier": name, "step": step if name == tier else -1} for name in ("memory", "peer", "disk", "persistent")]
    losses = [{"lost": "host", "recovery_step": -1, "tier": None}]
    if after_processes is not None:
        losses.append({"lost": "processes", "recovery_step": after_processes, "tier": tier})
    return {"tiers": rungs, "losses": losses}


def overview(**given: object) -> Overview:
    nothing = {
        **{
            "jobs": [],
            "more_jobs": 0,
            "recoverable": {},
            "host_states": {},
            "free_hosts": 0,
            "hosts": [],
            "troubled": 0,
        },
        **{"open_incidents": [], "newest_incident": None, "decisions": [], "orders": []},
    }
    return Overview(**(nothing | given))  # type: ignore[arg-type]


def test_an_ordinary_cluster_is_a_line_per_subject() -> None:
    resolved = incident(2, "resolved", resolved_at=NOW - 30)
    found = overview(
        jobs=[job()], recoverable={"llama": recoverable(40, "peer", 40)}, newest_incident=resolved,
        host_states={"healthy": 2, "silent": 0}, free_hosts=1,
    )  # fmt: skip
    assert screen(found, NOW, 80) == [
        " job    state    for  step  last step  resumes from  loss  a step  restarts",
        " llama  running  1 h  41    2.0 s ago  40 peer       0.5   0.25 s  1 (1 of 3)",
        "Hosts            2 healthy; 1 free",
        "Open incidents   none; newest: inc-2 worker_killed on host-001, resolved 06:05:…",
        "Next             nothing to do; flyball watch follows what happens",
    ]
    wide, narrow = screen(found, NOW, 120), screen(found, NOW, 40)
    assert "resolved 06:05:28, 0 steps lost" in wide[3]
    assert narrow[0].split() == ["job", "state", "step", "last", "step"]


def test_whatever_is_wrong_fits_into_a_terminal() -> None:
    waits = [job(f"job-{n}", state="submitted", message="waits for hosts: it needs 9 hosts") for n in range(6)]
    found = overview(
        jobs=waits, more_jobs=70, troubled=400, ended_at=NOW - 60,
        hosts=[host(n, "silent", reason="no report for 12 s, where one was due within 3 s") for n in range(2)],
        host_states={"healthy": 9600, "silent": 400}, open_incidents=[incident(n) for n in range(90)],
        decisions=[{"decision_id": f"dec-{n}", "at": NOW, "job": "llama", "kind": "hold", "reason": "x " * 99}
                   for n in range(10)],
        orders=[{"kind": "cordon"}, {"kind": "clear"}, {"kind": "silence"}, {"kind": "cordon"}],
    )  # fmt: skip
    lines = screen(found, NOW, 80)
    assert len(lines) < HEIGHT and max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    assert (
        "and 70 more (flyball get jobs)" in shown and "9600 healthy, 400 silent; 0 free, when the supervisor" in shown
    )
    assert "and 398 more (flyball status --hosts)" in shown and "and 87 older ones (flyball get incidents)" in shown
    assert "2 cordon, 1 silence (flyball get orders)" in shown and "dec-9" in shown


def test_a_supervisor_that_cannot_decide_says_why() -> None:
    lines = screen(overview(jobs=[job()], problem="The disk is full: nothing can be stored in x."), NOW, 80)
    assert "Supervisor       decides nothing: The disk is full: nothing can be stored in x." in lines
    assert lines[-1].startswith("Next             mend what the supervisor says first")


def test_a_message_of_several_lines_is_one_line() -> None:
    found = overview(open_incidents=[incident(1, message="ValueError: no\n  such file\n")])
    assert screen(found, NOW, 80)[3] == " inc-1 worker_killed, acting: ValueError: no such file"


def test_what_was_not_read_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(tmp_path, "job-0", at=NOW, state=JobState.SUCCEEDED, ended_at=NOW) / "supervisor"
    url = f"sqlite:///{folder / 'flyball.sqlite'}"
    with closing(Database(url)) as db, db.write() as connection:
        job = connection.execute(tables.jobs.select()).one()._mapping
        connection.execute(tables.jobs.insert(), [{**job, "job": f"job-{n}"} for n in range(1, 9)])
        about = {"job": "", "state": "open", "closed": False, "decided_at": 0.0}
        document = dump(Incident("inc-0", "", "", "host_silent", IncidentState.OPEN, NOW, NOW, "It is silent.", 1))
        rows = [about | {"number": n, "document": document} for n in range(1, 6)]
        connection.execute(tables.incidents.insert(), rows)

    def lines(read: int, job: str = "") -> str:
        monkeypatch.setattr(status, "JOBS_READ", read)
        monkeypatch.setattr(status, "INCIDENTS_READ", read)
        with LeftState(url) as client:
            return "\n".join(screen(status._overview(client, job, None), NOW, 80))

    whole, part = lines(10), lines(4)
    assert " and 3 more (flyball get jobs)" in whole and " and 2 older ones" in whole
    assert "Open incidents   5\n" in whole and "Open incidents   4 or more\n" in part
    assert " and at least 1 older ones" in part
    assert " and at least 2 more (flyball get jobs)" in lines(8) and "more (flyball get jobs)" not in lines(1, "job-3")


def test_the_worst_hosts_and_the_jobs_in_trouble_come_first() -> None:
    domain = {
        "host_ids": ["a", "b", "c", "d"],
        **{"states": ["healthy", "cordoned", "silent", "healthy"], "marks": ["", "", "", "drain"]},
    }
    assert troubled_hosts({"items": [domain]}) == ["c", "b", "d"]
    assert free_hosts({"items": [domain | {"jobs": ["", "", "", ""]}]}) == 1
    assert free_hosts({"items": [domain | {"jobs": ["llama", "", "", ""]}]}) == 0
    jobs = [job("old", ended_at=NOW, submitted_at=1.0), job("fine", submitted_at=9.0), job("llama", submitted_at=3.0)]
    assert [one["job"] for one in first_jobs(jobs, [incident(1)])] == ["llama", "fine", "old"]


@pytest.mark.parametrize(
    ("given", "next_one"),
    [
        ({}, "nothing trains; flyball run SCRIPT starts a job"),
        ({"jobs": [job()]}, "nothing to do"),
        ({"jobs": [job(state="submitted")]}, "flyball describe job llama"),
        ({"jobs": [job(state="interrupted")]}, "flyball run --resume llama"),
        ({"jobs": [job(state="failed", ended_at=NOW)]}, "flyball logs llama --tail 50"),
        ({"jobs": [job()], "hosts": [host(7, "silent")]}, "flyball describe host host-007"),
        ({"jobs": [job()], "open_incidents": [incident(4), incident(5)]}, "flyball describe incident inc-5"),
        (
            {"open_incidents": [incident(4, holding_for="an operator's approval of fail_job"), incident(5)]},
            "flyball approve inc-4",
        ),
    ],
)
def test_the_next_step_is_a_command(given: dict[str, Any], next_one: str) -> None:
    assert next_step(overview(**given)).startswith(next_one)


def test_a_restart_resumes_from_what_the_loss_of_the_processes_leaves() -> None:
    assert resumes_from(recoverable(40, "memory", 38)) == "38 memory"
    assert resumes_from(recoverable(40, "disk")) == "40 disk"  # an ended job has no ranks to lose
    assert resumes_from(recoverable(-1, "memory")) == "step 0"
    assert resumes_from(None) == resumes_from(recoverable(-1, "memory"), has_ended=True) == "-"


def test_hosts_are_listed_with_how_long_ago_they_reported(capsys: pytest.CaptureFixture[str]) -> None:
    print_hosts([host(1), host(2, last_report_at=NOW - 200)], NOW, ended_at=NOW - 60)
    out = capsys.readouterr().out
    assert "Hosts, as of the supervisor's end at 06:04:58 UTC" in out
    assert "host-001" in out and "1.0 s ago" in out.replace("\n", " ")


def test_what_carries_shards_between_hosts_is_shown_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    over_tcp = {"peer": "host-002", "transport": "tcp", "reason": "host-002: There is no RDMA device"}
    over_rdma = {"peer": "host-001", "transport": "rdma", "reason": "both hosts have an active RDMA port"}
    of_an_older_engine = host(3)
    registered = {"rdma_registered_bytes": 3 << 30}
    print_transports(
        [host(1, transports=[over_tcp]), host(2, transports=[over_rdma], counters=registered), of_an_older_engine]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Shards between hosts"
    shown = [line.split() for line in lines if line.strip().startswith("host-")]
    assert [row[:3] for row in shown] == [["host-001", "host-002", "tcp"], ["host-002", "host-001", "rdma"]]
    assert [" ".join(row[3:]) for row in shown] == [f"- {over_tcp['reason']}", f"3.0 GiB {over_rdma['reason']}"]
    print_transports([of_an_older_engine])
    assert capsys.readouterr().out.strip() == "Shards between hosts: none"


def test_a_jobs_times_are_shown() -> None:
    one = job(message="")
    row = ["llama", "running", "1 h", "05:05:58", 41, "0.5", "2.0 s ago", "0.25 s", "1 (1 of 3)"]
    assert job_row(one, NOW) == row
    assert loss_with_step(one) == "0.5 (step 40)"
    assert outcome(one, NOW) == ""
    ended = one | {"state": "failed", "ended_at": NOW - 60, "since": NOW - 60, "message": "ValueError"}
    assert outcome(ended, NOW) == "ended at 06:04:58 UTC, after 1 h: ValueError"
    slow = one | {"save_interval": {"wanted_steps": 1, "every_steps": 8, "save_s": 1.5, "step_s": 0.25}}
    output = "saves every 8 steps, not every 1: a save takes 1.50 s until all hosts and peers have it, a step 0.25 s"
    assert save_note(slow) == output
    assert save_note(slow | {"ended_at": NOW}) == save_note(one) == ""
    assert save_note(one | {"save_interval": slow["save_interval"] | {"every_steps": 1}}) == ""
    of_an_older_supervisor = {"job": "a", "state": "running", "submitted_at": NOW - 5, "newest_step": -1}
    assert job_row(of_an_older_supervisor, NOW)[3:7] == ["06:05:53", None, None, "-"]


@pytest.mark.parametrize(
    ("spec", "usually", "wide"),
    [
        ({"nnodes": 2}, "", ""),
        ({"nnodes": 4, "min_nodes": 2, "max_nodes": 0}, "", "asked for 4 hosts; it may go on with 2"),
        (
            {"nnodes": 3, "min_nodes": 2, "max_nodes": 4},
            *(["runs on 3 of the 4 hosts that it asked for; it may go on with 2"] * 2),
        ),
    ],
)
def test_a_job_on_fewer_hosts_than_it_asked_for_says_so(spec: dict[str, int], usually: str, wide: str) -> None:
    assert hosts_note({"spec": spec}, wide=False) == usually
    assert hosts_note({"spec": spec}, wide=True) == wide
    assert hosts_note({"spec": spec, "ended_at": NOW}, wide=True) == ""
