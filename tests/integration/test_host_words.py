"""A real supervisor, and hosts with tokens of their own that tell it what they were given, or what they were not: the
worst that one of them can do is to harm its own ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.clocks.waits import until
from support.hosts.telling import TellingHost, made_up
from support.servers.here import bearer, client_of, supervisor_in

from flyball.contracts.cluster import JobSpec
from flyball.contracts.decisions import StartWorkers
from flyball.contracts.errors import FlyballError
from flyball.contracts.identity import Fence
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded, FalseAlarm, Signal
from flyball.contracts.reports.standings import LastObeyed
from flyball.contracts.wire import encode
from services.controller.updates import standing_words
from services.main import Supervisor

SETTINGS = {"policy": {"spare_fresh_s": 600.0}, "detector": {"silence": {"min_deadline_s": 600.0}}}
JOB = JobSpec("honest", ("train.py",), "/work", nnodes=2, nproc_per_node=1)


class Site:
    """A supervisor that may lose its database, and two hosts that outlive it."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root, self._stack = root, stack
        self._starts = 0
        self.supervisor: Supervisor
        self.client: httpx.Client
        self.hosts: dict[str, TellingHost] = {}

    def start(self, **settings: object) -> None:
        """Start a supervisor on an empty database."""
        self._starts += 1
        self.supervisor = self._stack.enter_context(
            supervisor_in(self._root / str(self._starts), **SETTINGS | settings)
        )
        self.client = self._stack.enter_context(client_of(self.supervisor))
        kept = self.hosts
        self.hosts = {}
        for name in ("host-a", "host-b"):
            host = TellingHost(name, str(settings.get("hosts_token", self.supervisor.token)), self.supervisor.url)
            self._stack.callback(host.close)
            if name in kept:
                for field in ("held", "ended", "end_seals", "obeyed"):
                    setattr(host, field, getattr(kept[name], field))
            host.report()
            self.hosts[name] = host
        until(lambda: len(self.items("/v1/hosts")) == 2, "the hosts")

    def items(self, path: str) -> list[dict[str, Any]]:
        found = self.client.get(path)
        assert found.status_code == 200, found.text
        return list(found.json()["items"])

    def run_honest_job(self) -> None:
        self.client.post("/v1/jobs", content=encode(JOB)).raise_for_status()
        for host in self.hosts.values():
            until(lambda host=host: host.obey(1.0) and JOB.job in host.held, "the start")
        until(lambda: self.job()["state"] == "running" and self.job()["generation"] == 1, "the job")

    def job(self, name: str = JOB.job) -> dict[str, Any]:
        return dict(self.client.get(f"/v1/jobs/{name}").json())

    def incident(self, cause: str) -> dict[str, Any]:
        open_now = [i for i in self.items("/v1/incidents") if i["state"] not in ("resolved", "escalated")]
        return until(lambda: next((i for i in self.items("/v1/incidents") if i["cause"] == cause), None), str(open_now))

    def settled(self, standing: Any) -> None:  # noqa: ANN401 - a HostStanding
        """Wait until a standing was taken in, which is when its host would get commands again."""
        until(lambda: self._decided(standing.host_id), "the decision about the standing")

    def _decided(self, host_id: str) -> bool:
        closed = ("resolved", "escalated")
        about = [i for i in self.items("/v1/incidents") if i["cause"] in ("database_older", "database_new")]
        return any(host_id in i["message"] and i["state"] in closed for i in about)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name, value in {"GATHER_S": 0.3, "HEARD_WITHIN_S": 1.0, "WORD_WITHIN_S": 3.0}.items():
        monkeypatch.setattr(standing_words, name, value)
    with ExitStack() as stack:
        made = Site(tmp_path, stack)
        made.start()
        yield made


Forge = Callable[[Site], Any]


def on_the_other_host(site: Site) -> Any:  # noqa: ANN401 - a HeldJob
    return made_up({"host-a": (0,)})


def on_both(site: Site) -> Any:  # noqa: ANN401
    return made_up({"host-a": (0,), "host-b": (1,)}, nnodes=2)


def with_a_borrowed_seal(site: Site) -> Any:  # noqa: ANN401
    """Its own, genuine one of the honest job, over another program."""
    held = site.hosts["host-b"].held[JOB.job]
    placement = msgspec.structs.replace(held.placement, generation=9)
    spec = msgspec.structs.replace(held.spec, argv=("/bin/sh", "-c", "id"), program=True)
    return msgspec.structs.replace(held, spec=spec, placement=placement, fence=Fence(held.fence.epoch, 9))


@pytest.mark.parametrize("forge", [on_the_other_host, on_both, with_a_borrowed_seal])
def test_a_job_that_nobody_granted_is_run_nowhere(site: Site, forge: Forge) -> None:
    site.run_honest_job()
    liar, victim = site.hosts["host-b"], site.hosts["host-a"]
    got = len(victim.got)
    told = liar.standing(jobs=(forge(site),), obeyed=LastObeyed("", 1000, "act-deadbeef-10000.start.host-b.1"))
    liar.tell(told)
    site.settled(told)
    assert [job["job"] for job in site.items("/v1/jobs")] == [JOB.job]
    assert (site.job()["state"], site.job()["generation"]) == ("running", 1)
    victim.obey(0.5)
    assert victim.got[got:] == []
    audited = [(e["operation"], e["target"], e["role"]) for e in site.items("/v1/audit")]
    assert ("report_standing", "host-b", "daemon") in audited


def test_a_host_ends_no_job_by_saying_so(site: Site) -> None:
    site.run_honest_job()
    liar = site.hosts["host-b"]
    obeyed = LastObeyed("", 1000, "act-deadbeef-10000.end.host-b.1")
    told = liar.standing(jobs=(), ended={JOB.job: 10**6}, obeyed=obeyed)
    liar.tell(told)
    site.settled(told)
    assert site.job()["state"] == "running"


def test_numbers_that_cannot_be_are_an_incident_and_the_leader_goes_on(site: Site) -> None:
    liar = site.hosts["host-b"]
    liar.tell(liar.standing(jobs=(), obeyed=LastObeyed("", 2**62 - 1, f"act-deadbeef-{10**18 - 1}.start.host-b.1")))
    assert "host-b" in site.incident("standing_implausible")["message"]
    site.run_honest_job()
    assert site.client.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"world_size":1', b'"world_size":4000000'),
        (b'"generation":7', b'"generation":99999999999'),
        (b'"epoch":5', b'"epoch":9223372036854775808'),
        (b'"restart_count":0', b'"restart_count":1e300'),
        (b'"ranks":[0]', b'"ranks":[1000000000]'),
        (b'"unheard_s":100.0', b'"unheard_s":-1'),
    ],
)
def test_what_no_field_holds_is_refused_at_the_door(site: Site, old: bytes, new: bytes) -> None:
    body = encode(site.hosts["host-b"].standing(jobs=(made_up({"host-b": (0,)}),)))
    assert body.count(old) >= 1
    sent = site.client.post(
        "/v1/hosts/host-b/standing", content=body.replace(old, new), headers=bearer(site.supervisor.token, "host-b")
    )
    assert (sent.status_code, sent.json()["code"]) == (400, "invalid_message")


def test_a_lost_database_adopts_what_seals_prove_also_under_a_new_secret(site: Site) -> None:
    site.run_honest_job()
    former = site.supervisor.token
    site.start(token="a-new-secret-of-the-cluster", former_token=former)
    for host in site.hosts.values():
        host.tell()
    until(lambda: JOB.job in {job["job"] for job in site.items("/v1/jobs")}, "the adoption")
    assert (site.job()["state"], site.job()["generation"]) == ("running", 1)
    (adopted,) = [e for e in site.items("/v1/audit") if e["operation"] == "adopt_job"]
    assert adopted["detail"]["hosts"] == ["host-a", "host-b"]


def test_another_secret_proves_nothing_until_an_operator_says_so(site: Site) -> None:
    site.run_honest_job()
    site.start(token="another-secret-altogether")
    for host in site.hosts.values():
        host.tell()
    message = site.incident("job_not_adopted")["message"]
    assert "flyball adopt honest" in message and "train.py" in message
    assert site.items("/v1/jobs") == []
    host = site.hosts["host-a"]
    refused = site.client.post("/v1/jobs/honest/adopt", json={}, headers=bearer(site.supervisor.token, "host-a"))
    assert refused.status_code == 403
    assert site.client.post("/v1/jobs/honest/adopt", json={"reason": "I know it"}).status_code == 202
    until(lambda: [job["state"] for job in site.items("/v1/jobs")] == ["running"], "the adoption")
    assert ("adopt", "honest", "operator") in [
        (e["operation"].removesuffix("_job"), e["target"], e["role"]) for e in site.items("/v1/audit")
    ]
    assert host.obey(0.2) == ()


def test_a_cancelled_job_is_not_revived_by_an_old_seal(site: Site) -> None:
    site.run_honest_job()
    replayed = site.hosts["host-b"].held[JOB.job]
    site.client.post(f"/v1/jobs/{JOB.job}/stop").raise_for_status()

    def both_ended() -> bool:
        for host in site.hosts.values():
            host.obey(0.5)
        return all(host.ended for host in site.hosts.values())

    until(both_ended, "the end")
    until(lambda: site.job()["state"] == "stopped", "the end")
    site.start(token=site.supervisor.token)
    site.hosts["host-b"].tell(site.hosts["host-b"].standing(jobs=(replayed,), ended={}, end_seals={}))

    def asked() -> bool:
        """host-a is not ahead, as far as this supervisor knows: its word is asked for."""
        poll = site.hosts["host-a"].poll()
        if poll.report_standing:
            site.hosts["host-a"].tell()
        return poll.report_standing

    until(asked, "the question")
    message = site.incident("job_not_adopted")["message"]
    assert "host-a had ranks of it and got the command to end it" in message
    assert site.items("/v1/jobs") == []


def signal_of(body: Any) -> Signal:  # noqa: ANN401 - a SignalBody
    return Signal("host-b", "i1", 1, 1.0, body)


def test_what_only_others_may_say_is_refused(site: Site) -> None:
    hot = {"kind": "thermal", "severity": "info", "message": "It is hot."}
    as_host = bearer(site.supervisor.token, "host-b")
    path = "/v1/hosts/host-b/conditions"
    assert site.client.post(path, json=hot).status_code == 202
    assert site.client.post(path, json=hot, headers=as_host).status_code == 403
    assert site.client.delete(path, params={"kind": "thermal"}, headers=as_host).status_code == 403
    assert site.client.post(path, json={**hot, "reporter": "dcgm"}, headers=as_host).status_code == 202
    operators = HostCondition("thermal", Severity.INFO, "It is hot.", "api:operator", 1.0)
    for body in (
        FalseAlarm("honest", 1, 0, (0,), 3, 1.0, 2.0),
        ConditionBegan(operators),
        ConditionEnded("api:operator", "thermal"),
    ):
        with pytest.raises(FlyballError, match=r"only|others reported"):
            site.hosts["host-b"].report(signals=(signal_of(body),))
    assert len(site.client.get("/v1/hosts/host-b").json()["conditions"]) == 2


def test_a_start_is_sealed_with_the_whole_placement(site: Site) -> None:
    site.run_honest_job()
    seals = [
        command.body.seal
        for host in site.hosts.values()
        for command in host.got
        if isinstance(command.body, StartWorkers)
    ]
    assert len({seal.whole for seal in seals}) == 1 and len({seal.mac for seal in seals}) == 2
    assert {seal.generation for seal in seals} == {1}
