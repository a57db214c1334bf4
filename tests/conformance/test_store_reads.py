"""The read models for users. Everything must be plain JSON."""

from __future__ import annotations

import json

import msgspec
import pytest

from flyball.contracts.checkpoints import RestoreReport, ShardCopy, Tier
from flyball.contracts.cluster import HostState, Phase, RankStatus
from flyball.contracts.decisions import ActionState, CommandResult, RankPosition
from flyball.contracts.errors import NotFound
from flyball.contracts.events import Event, EventKind
from services.actuator.ports import PlaybookStep
from services.controller.round.view import HostChange
from services.runtime.paging import Page
from services.store.read.read_models import SqlReadModels
from services.store.sql import tables


@pytest.fixture
def reads(stores) -> SqlReadModels:
    return SqlReadModels(stores.db)


@pytest.fixture
def recovered(stores, make, clock):
    """A worker was killed, its job restarted from a peer's copies, and the incident was closed."""
    stores.run_job()
    restart = stores.begin_restart()
    clock.now_s = 1001.0
    for host in ("host-a", "host-b"):
        result = CommandResult(positions=(RankPosition(0, 7),), free_port=29501)
        stores.actions.commands_for(host, 1001.1)
        stores.actions.record(make.update(f"act-2.stop.{host}.1", result=result, at=1001.2))
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, make.start_step(restart, 6), 1001.5)
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, PlaybookStep("start", ActionState.SUCCEEDED), 1002.0)
    report = make.report(
        "host-a",
        sent_at=1003.0,
        ranks=(RankStatus("job", 2, 0, 200, Phase.STEP, 8, 0.1),),
        restores=(RestoreReport("job", 2, 0, 6, Tier.PEER, "host-b", 1000, 1000, 0.1, 1002.5, "rdma"),),
    )
    stores.status.record_reports([(report, 1003.0)])
    stores.commit(
        incidents=(make.incident(state="resolved", since=1004.0, resolved_at=1004.0, action_id="act-2", lost_steps=1),),
    )
    return stores


def test_a_job_with_its_ranks(recovered, reads, make) -> None:
    job = reads.job("job")
    assert json.loads(json.dumps(job)) == job
    assert (job["job"], job["state"], job["generation"], job["restart_count"]) == ("job", "running", 2, 1)
    assert (job["newest_step"], job["world_size"], job["ended_at"]) == (8, 4, None)
    assert job["spec"]["argv"] == ["train.py"]
    assert [(r["rank"], r["host_id"], r["pid"], r["step"], r["phase"]) for r in job["ranks"]] == [
        (0, "host-a", 200, 8, "step"),
        (1, "host-a", None, -1, "waiting"),
        (2, "host-b", None, -1, "waiting"),
        (3, "host-b", None, -1, "waiting"),
    ]
    recovered.commit(signals=(make.signal(9, make.exited(0, generation=2)),))
    ended = reads.job("job")["ranks"][0]
    assert (ended["phase"], ended["signal_number"]) == ("exited", 9)


@pytest.mark.parametrize("per_summary", [1, 4])
def test_the_duration_of_a_step_also_if_each_has_a_summary_of_its_own(recovered, reads, per_summary: int) -> None:
    """A restart in between counts as no step."""
    for first, generation in ((0, 1), (per_summary, 2), (2 * per_summary, 2), (3 * per_summary, 2)):
        times = [1000.0 * generation + 3.0 * step for step in range(first, first + per_summary)]
        data = {"first_step": first, "completed_at": times}
        recovered.log.append([Event(at=times[-1], kind=EventKind.STEPS, job="job", generation=generation, data=data)])
    job = reads.job("job")
    assert (job["step_s"], job["last_step_at"]) == (3.0, times[-1])


def test_a_host_does_not_end_the_ranks_of_another(recovered, reads, make) -> None:
    recovered.commit(
        signals=(
            make.signal(9, make.exited(2, generation=2)),  # host-a, about a rank of host-b
            make.signal(1, make.exited(3, generation=2), source="host-b", incarnation="inc-b"),
        )
    )
    assert [rank["phase"] for rank in reads.job("job")["ranks"]] == ["step", "waiting", "waiting", "exited"]


def pages(read, key: str, limit: int) -> list[list[str]]:  # type: ignore[no-untyped-def]
    """The keys of all pages, from the newest on."""
    found: list[list[str]] = []
    before = ""
    while page := [item[key] for item in read(Page(limit, before))]:
        found.append(page)
        before = page[0]
    return found


def test_jobs_come_in_pages_and_those_that_run_however_old_they_are(stores, reads, make) -> None:
    stores.run_job()
    names = [f"job-{number}" for number in range(5)]
    for name in reversed(names):  # at the same moment, so that the name decides the order
        stores.jobs.submit(make.spec(job=name), 2000.0)
    assert pages(reads.jobs, "job", 2) == [["job-3", "job-4"], ["job-1", "job-2"], ["job", "job-0"]]
    assert [j["job"] for j in reads.jobs(Page(2, "job-2"))] == ["job-0", "job-1"]
    assert reads.jobs(Page(2, "no-such-job")) == []
    stores.jobs.request_stop("job-4", 2001.0)
    with stores.db.write() as connection:
        connection.execute(tables.jobs.update().where(tables.jobs.c.job == "job-4").values(state="stopped"))
    assert [j["job"] for j in reads.jobs(open_only=True)] == ["job", *names[:4]]
    assert [job["hosts"] for job in reads.jobs()] == [2, 0, 0, 0, 0, 0]
    assert not any("ranks" in job for job in reads.jobs()), "a list of them would be long"


def test_decisions_and_incidents_come_in_pages(recovered, reads) -> None:
    assert pages(lambda page: reads.decisions(None, page), "decision_id", 1) == [["dec-2"], ["dec-1"]]
    assert pages(lambda page: reads.decisions("job", page), "decision_id", 5) == [["dec-1", "dec-2"]]
    assert [d["decision_id"] for d in reads.decisions("job", Page(after="dec-1"))] == ["dec-2"]
    assert reads.decisions("job", Page(after="dec-2")) == []
    assert pages(lambda page: reads.incidents("job", page), "incident_id", 1) == [["inc-1"]]


def test_values_of_an_environment_are_for_the_workers_alone(stores, reads, make) -> None:
    spec = make.spec(env={"HF_TOKEN": "hf_secret"})
    stores.jobs.submit(spec, 1000.0)
    stores.lead()
    start = make.start()
    assert start.action is not None
    plan = msgspec.structs.replace(start.action, spec=spec)
    stores.commit(decisions=(msgspec.structs.replace(start, action=plan),))
    assert reads.job("job")["spec"]["env"] == {"HF_TOKEN": "***"}
    assert reads.decision("dec-1")["action"]["plan"]["spec"]["env"] == {"HF_TOKEN": "***"}
    shown = [reads.jobs(), reads.decisions("job"), reads.decision("dec-1"), stores.log.read(None, 0, 100)]
    assert "hf_secret" not in str(shown)
    (progress,) = stores.actions.open_actions()
    assert progress.plan.spec == spec


def test_hosts_with_their_job(recovered, reads, make) -> None:
    recovered.status.record_reports([(make.report("host-c", sent_at=1003.0), 1003.0)])
    hosts = reads.hosts()
    assert json.loads(json.dumps(hosts)) == hosts
    assert [(h["host_id"], h["state"], h["job"], h["ranks"]) for h in hosts] == [
        ("host-a", "healthy", "job", [0, 1]),
        ("host-b", "healthy", "job", [2, 3]),
        ("host-c", "healthy", "", []),
    ]


def test_hosts_that_left_in_order_are_shown_on_request(recovered, reads, make) -> None:
    for at, host_id in ((1003.0, "host-b"), (1003.0, "host-c"), (1003.0, "host-d")):
        recovered.status.record_reports([(make.report(host_id, sent_at=at), at)])
    for host_id in ("host-b", "host-c"):
        recovered.status.record_reports([(make.report(host_id, sent_at=1004.0, leaves=True), 1004.0)])
    assert [h["host_id"] for h in reads.hosts()] == ["host-a", "host-b", "host-d"], "host-b has ranks, and so is missed"
    everything = reads.hosts(also_left=True)
    assert {h["host_id"]: h["left_at"] for h in everything} == {
        "host-a": None,
        "host-b": 1004.0,
        "host-c": 1004.0,
        "host-d": None,
    }
    assert reads.host("host-c")["left_at"] == 1004.0
    assert [h["host_id"] for h in reads.hosts(Page(1), also_left=True)] == ["host-d"]
    assert [h["host_id"] for h in reads.hosts(Page(1, "host-d"))] == ["host-b"]


def test_hosts_that_left_are_not_named_one_by_one(stores, reads, make, statements) -> None:
    def leave(host_id: str) -> list[str]:
        stores.status.record_reports([(make.report(host_id, sent_at=1003.0), 1003.0)])
        stores.status.record_reports([(make.report(host_id, sent_at=1004.0, leaves=True), 1004.0)])
        statements.clear()
        assert reads.hosts() == []
        return list(statements)

    assert leave("host-a") == leave("host-b"), "a database takes a limited number of parameters"


def test_hosts_come_in_pages_by_name(stores, reads, make) -> None:
    stores.status.record_reports([(make.report(f"host-{n}", sent_at=1003.0), 1003.0) for n in range(5)])
    pages = [reads.hosts(Page(2)), reads.hosts(Page(2, "host-3")), reads.hosts(Page(2, "host-1"))]
    named = [[h["host_id"] for h in page] for page in pages]
    assert named == [["host-3", "host-4"], ["host-1", "host-2"], ["host-0"]]


def test_an_incident_with_all_that_a_report_needs(recovered, reads) -> None:
    (incident,) = reads.incidents("job")
    assert json.loads(json.dumps(incident)) == incident
    assert (incident["signal"], incident["signals"], incident["decisions"]) == (
        "worker_exited",
        ["worker_exited"],
        ["restart_in_place"],
    )
    moments = [incident[name] for name in ("fault_at", "observed_at", "opened_at", "decided_at", "resolved_at")]
    assert moments == [1000.0, 1000.0, 1000.0, 1000.0, 1004.0]
    assert incident["durations_s"] == {"acting": 4.0}
    shown = ("rank", "tier", "source_host", "socket_bytes", "transport")
    assert [tuple(r[name] for name in shown) for r in incident["restored_from"]] == [
        (0, "peer", "host-b", 1000, "rdma")
    ]
    assert (incident["lost_steps"], [change["state"] for change in incident["timeline"]]) == (1, ["acting", "resolved"])
    assert reads.incidents(None) == [incident]


def test_a_later_signal_of_the_same_generation_is_not_the_incidents(recovered, reads, make) -> None:
    observed = reads.incident("inc-1")["observed"]
    recovered.commit(signals=(make.signal(9, make.exited(1), at=1500.0),))
    assert reads.incident("inc-1")["observed"] == observed != []
    assert reads.incidents("another") == []


def test_a_decision_explained(recovered, reads) -> None:
    decision = reads.decision("dec-2")
    assert json.loads(json.dumps(decision)) == decision
    assert (decision["kind"], decision["rule"], decision["reason"]) == (
        "restart_in_place",
        "restart_in_place",
        "Rank 0 was killed.",
    )
    assert decision["incident"]["incident_id"] == "inc-1"
    assert [(s["kind"], s["source"], s["body"]["signal_number"]) for s in decision["signals"]] == [
        ("worker_exited", "host-a", 9)
    ]
    action = decision["action"]
    assert (action["action_id"], action["state"], action["ended_at"]) == ("act-2", "succeeded", 1002.0)
    assert [(p["phase"], p["state"]) for p in action["phases"]] == [
        ("", "queued"),
        ("stop", "dispatched"),
        ("start", "dispatched"),
        ("start", "succeeded"),
    ]
    assert [(c["command_id"], c["kind"], c["state"]) for c in action["commands"]] == [
        ("act-2.stop.host-a.1", "stop_workers", "succeeded"),
        ("act-2.stop.host-b.1", "stop_workers", "succeeded"),
        ("act-2.start.host-a.1", "start_workers", "queued"),
        ("act-2.start.host-b.1", "start_workers", "queued"),
    ]
    assert (action["commands"][0]["dispatched_at"], action["commands"][0]["result"]["free_port"]) == (1001.1, 29501)


def test_decisions_in_their_order(recovered, reads) -> None:
    assert [(d["decision_id"], d["kind"], d["action_state"]) for d in reads.decisions("job")] == [
        ("dec-1", "start_job", "succeeded"),
        ("dec-2", "restart_in_place", "succeeded"),
    ]
    assert reads.decisions("another") == []


def test_checkpoints_count_only_where_they_can_be_had(recovered, reads, make) -> None:
    def copies(tier: Tier, host_id: str, step: int, *ranks: int) -> tuple[ShardCopy, ...]:
        return tuple(ShardCopy("job", 2, step, rank, tier, host_id, 10, "d") for rank in ranks)

    own_a, own_b = copies(Tier.MEMORY, "host-a", 8, 0, 1), copies(Tier.MEMORY, "host-b", 8, 2, 3)
    durable = copies(Tier.PERSISTENT, "", 4, 0, 1, 2, 3)
    recovered.status.record_reports([(make.report("host-a", sent_at=1005.0, copies=(*own_a, *durable)), 1005.0)])
    recovered.status.record_reports([(make.report("host-b", sent_at=1005.0, copies=own_b), 1005.0)])
    found = reads.checkpoints("job", with_copies=True)
    assert reads.checkpoints("job") == found | {"copies": []}
    assert json.loads(json.dumps(found)) == found
    assert (found["recovery_point"], found["tiers"]["memory"]["newest_complete_step"]) == (8, 8)
    assert found["tiers"]["persistent"] == {
        "copies": 4,
        "size_bytes": 40,
        "newest_step": 4,
        "newest_complete_step": 4,
    }
    recovered.commit(hosts=(HostChange("host-b", HostState.SILENT, "no report"),))
    found = reads.checkpoints("job", with_copies=True)
    assert found["recovery_point"] == 4
    assert {c["host_id"] for c in found["copies"] if not c["reachable"]} == {"host-b"}


def test_what_does_not_exist_is_not_found(reads) -> None:
    for look in (lambda: reads.job("x"), lambda: reads.checkpoints("x"), lambda: reads.decision("dec-7")):
        with pytest.raises(NotFound) as caught:
            look()
        assert caught.value.hint
    with pytest.raises(NotFound):
        reads.decision("dec-seven")
    assert reads.jobs() == reads.hosts() == reads.incidents(None) == reads.decisions(None) == []


def test_the_event_log_is_read_on_and_from_its_end(stores) -> None:
    for number in range(5):
        stores.log.append([Event(at=float(number), kind=EventKind.FAULT_INJECTED, job="job" if number % 2 else "")])
    stores.log.append([Event(at=9.0, kind=EventKind.HOST_LEFT, job="another")])
    assert [e.at for _, e in stores.log.read(None, 0, 100)] == [0.0, 1.0, 2.0, 3.0, 4.0, 9.0]
    first = stores.log.read("job", 0, 2)
    assert [e.at for _, e in first] == [0.0, 1.0]
    assert [e.at for _, e in stores.log.read("job", first[-1][0], 100)] == [2.0, 3.0, 4.0]
    assert [e.at for _, e in stores.log.newest("job", 2)] == [3.0, 4.0]
    assert [e.at for _, e in stores.log.read(None, 0, 100, {EventKind.HOST_LEFT})] == [9.0]
    assert stores.log.last() == 6


def test_the_story_of_a_domain_has_the_decisions_of_its_parts(recovered, reads, make) -> None:
    whole = make.incident(9, "resolved", job="", host_id="", cause="domain_silent", parts=("inc-1",), generation=0)
    recovered.commit(incidents=(whole,))
    story = reads.incident("inc-9")
    assert story["parts"] == ["inc-1"]
    assert [decided["decision_id"] for decided in story["decided"]] == ["dec-2"]
    assert {"decision", "action"} <= {line["part"] for line in story["story"]}
    assert reads.incident("inc-1")["parts"] == []
