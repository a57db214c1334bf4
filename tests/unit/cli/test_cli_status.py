"""What `flyball status` shows for many hosts, and its times."""

from __future__ import annotations

from typing import Any

import pytest

from flyball.cli.look.hosts_table import print_hosts, print_transports
from flyball.cli.look.jobs_table import hosts_note, job_row, outcome, save_note

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


def shown(
    capsys: pytest.CaptureFixture[str],
    hosts: list[dict[str, Any]],
    *,
    everything: bool = False,
    ended_at: float | None = None,
) -> str:
    print_hosts(hosts, NOW, everything=everything, ended_at=ended_at)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return out


def test_few_hosts_are_shown_with_how_long_ago_they_reported(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, [host(1), host(2, last_report_at=NOW - 200)])
    assert "host-001" in out and "1.0 s ago" in out and "3 min 20 s ago" in out


def test_of_many_hosts_only_unhealthy_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    many = [host(n) for n in range(100)]
    assert shown(capsys, many).strip() == "100 hosts: 100 healthy (--hosts lists them)"
    many[7] = host(7, "silent", reason="no report")
    many[9] = host(9, drain={"state": "requested"})
    out = shown(capsys, many)
    assert "100 hosts: 99 healthy, 1 silent; not healthy:" in out
    assert "host-007" in out and "host-009" in out and "host-008" not in out
    assert "host-008" in shown(capsys, many, everything=True)


def test_very_many_unhealthy_hosts_are_cut_off_with_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, [host(n, "silent", reason="no report") for n in range(500)])
    assert "500 hosts: 500 silent" in out and "and 460 more (--hosts lists all)" in out
    assert len(out.splitlines()) < 140


def test_the_state_of_an_ended_supervisor_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Hosts, as of the supervisor's end at 06:04:58 UTC" in shown(capsys, [host(1)], ended_at=NOW - 60)


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
    job = {
        "job": "llama",
        "state": "running",
        "message": "",
        "submitted_at": NOW - 3_700,
        "started_at": NOW - 3_600,
        "since": NOW - 3_600,
        "newest_step": 41,
        "last_step_at": NOW - 2,
        "step_s": 0.25,
        "restart_count": 1,
        "restarts_used": 1,
        "spec": {"max_restarts": 3},
        "loss": {"value": 0.5, "step": 41},
    }
    row = ["llama", "running", "1 h", "05:05:58", 41, "0.5", "2.0 s ago", "0.25 s", "1 (1 of 3 used)"]
    assert job_row(job, NOW) == row
    assert outcome(job, NOW) == ""
    ended = job | {"state": "failed", "ended_at": NOW - 60, "since": NOW - 60, "message": "ValueError"}
    assert outcome(ended, NOW) == "ended at 06:04:58 UTC, after 1 h: ValueError"
    slow = job | {"save_interval": {"wanted_steps": 1, "every_steps": 8, "save_s": 1.5, "step_s": 0.25}}
    output = "saves every 8 steps, not every 1: a save takes 1.50 s until all hosts and peers have it, a step 0.25 s"
    assert save_note(slow) == output
    assert save_note(slow | {"ended_at": NOW}) == save_note(job) == ""
    assert save_note(job | {"save_interval": slow["save_interval"] | {"every_steps": 1}}) == ""
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
