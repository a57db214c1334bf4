"""A host without ranks says anything, of valid types, thousands of times: nothing is decided about a job of others, no
other host gets a command, and the supervisor goes on. `FLYBALL_FUZZ_TRIES=100000` says it more often."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from msgspec import inspect
from support.clocks.waits import until
from support.commands.run_folders import clean_environment
from support.hosts.telling import CLOCK, TellingHost
from support.servers.parts import ServicePart

from flyball.contracts.cluster import JobSpec, Phase, RankStatus
from flyball.contracts.decisions import CommandUpdate
from flyball.contracts.reports.conditions import ConditionRequest
from flyball.contracts.reports.rank_columns import RankSteps, in_columns, steps_together
from flyball.contracts.reports.rank_logs import LogPiece
from flyball.contracts.reports.signals import Report
from flyball.contracts.reports.standings import HostStanding
from flyball.contracts.wire import WIRE_VERSION, encode

pytestmark = pytest.mark.proof

TRIES = int(os.environ.get("FLYBALL_FUZZ_TRIES", "1500"))
LOOK_EVERY = 500
JOBS = {"honest": 2, "other": 1}  # name -> hosts
SENDER = "host-x"
MEMORY_BYTES = 256 << 20  # more than it had after the first looks
ITS_OWN = "stop_superseded_workers"  # the host is told to stop workers that it claims to have
SETTINGS = {
    "FLYBALL_POLICY": '{"spare_fresh_s": 100000.0, "verify_deadline_s": 1000000.0}',
    "FLYBALL_DETECTOR": '{"silence": {"min_deadline_s": 100000.0}}',
    "FLYBALL_MAX_REQUESTS_PER_S": "0",
}

ODD = 0.01  # of values lie outside of their type's bounds
NUMBERS = (-1, 0, 1, 2, 3, 7, 100, 10**6, 2**31 - 1, 2**40, 2**53, 2**62, 2**63 - 2)
FLOATS = (0.0, 0.5, 1.0, 60.0, 1e6, 1e9, 1.7e9)
MOMENTS = (
    *("at", "sent_at", "since", "until", "deadline_at", "spawned_at", "attached_at", "restore_began_at"),
    *("restored_at", "first_step_at"),
)
TEXTS = ("", "x", "sh -c id", "../../etc", "\x1b[2J", "{}", "é" * 40, "api:operator", "operator")


class TriedSupervisor:
    """A supervisor as a process, three hosts with two jobs of theirs, and one that lies."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.part = ServicePart("all", root / "supervisor", clean_environment() | SETTINGS)
        stack.callback(self._end)
        self.part.start()
        self.client = stack.enter_context(self.part.client())
        self.liar = stack.enter_context(self.part.client(SENDER))
        self.hosts = [TellingHost(f"host-{name}", self.part.token, self.part.url) for name in "abc"]
        for host in self.hosts:
            stack.callback(host.close)
            host.report(interval_s=100_000.0)
        until(lambda: len(self.items("/v1/hosts")) == len(self.hosts), "the hosts")
        for name, nnodes in JOBS.items():
            spec = JobSpec(name, ("x.py",), "/work", nnodes=nnodes, nproc_per_node=1)
            self.client.post("/v1/jobs", content=encode(spec)).raise_for_status()
            until(lambda name=name, nnodes=nnodes: self.hosts_of(name) == nnodes, name)
        self.before = self.decisions()
        self.got = [len(host.got) for host in self.hosts]

    def _end(self) -> None:
        if self.part.process is not None:
            self.part.end()

    def hosts_of(self, job: str) -> int:
        for host in self.hosts:
            host.obey(0.05)
        return sum(job in host.held for host in self.hosts)

    def items(self, path: str) -> list[dict[str, Any]]:
        found = self.client.get(path)
        assert found.status_code == 200, found.text
        return list(found.json()["items"])

    def decisions(self) -> list[tuple[str, str]]:
        found = [one for job in JOBS for one in self.items(f"/v1/decisions?job={job}&limit=500")]
        return [(one["rule"], one["job"]) for one in found]

    def look(self) -> None:
        """The invariants."""
        assert self.client.get("/readyz").status_code == 200
        assert [one for one in self.decisions() if one[0] != ITS_OWN] == self.before
        shown = {job["job"]: (job["state"], job["generation"]) for job in self.items("/v1/jobs")}
        assert shown == dict.fromkeys(JOBS, ("running", 1))
        about = [i for i in self.items("/v1/incidents?limit=500") if i["job"] in JOBS]
        assert {i["cause"] for i in about} <= {"superseded_workers"}
        assert {i["host_id"] for i in about} <= {SENDER}
        for host in self.hosts:
            host.obey(0.01)
        assert [len(host.got) for host in self.hosts] == self.got, "a command to a host that was not granted"
        metrics = self.client.get("/metrics").text
        assert {float(v) for v in re.findall(r"^flyball_loop_restarts_total\{[^}]*\} (\S+)$", metrics, re.M)} == {0.0}

    @property
    def memory_bytes(self) -> int:
        assert self.part.process is not None
        return int(psutil.Process(self.part.process.pid).memory_info().rss)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TriedSupervisor]:
    with ExitStack() as stack:
        yield TriedSupervisor(tmp_path, stack)


class Meanings:
    """Bodies of one sender, made from their types, so that a new field is tried as well. The names are those of a real
    cluster, and some that nobody has."""

    def __init__(
        self, random: Random, sender: str, *, hosts: Sequence[str], jobs: Sequence[str], commands: Sequence[str]
    ) -> None:
        self.random = random
        self.sender = sender
        self.now = 0.0
        self._seq = 0
        hosts, jobs = (*hosts, sender, "nobody"), (*jobs, "nope", "a" * 63)
        forged = ("act-1.stop.host-a.1", "act-deadbeef-7.start.host-b.1", f"act-{10**18}", "", "x" * 190)
        self._meant: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(("host_id", "peer", "source", "master_address", "source_host"), self._one(hosts)),
            **dict.fromkeys(("unreachable_peers", "witnesses", "heard_by", "group"), self._some(hosts)),
            "job": self._one(jobs),
            "incarnation": self._one(("i1", "ix", "x")),
            "command_id": self._one((*commands, *forged)),
            "cluster": self._one(("", "0" * 32)),
            **dict.fromkeys(("generation", "stalled_generation"), self._one((-1, 0, 1, 2, 3, 10**6, 2**31 - 1))),
            **dict.fromkeys(MOMENTS, lambda: self.now),
            **dict.fromkeys(("rank",), self._one((0, 1, 2, 99, 999_999))),
            "ranks": lambda: sorted(self.random.sample((0, 1, 2, 3, 999_999), self.random.randint(0, 3))),
            "reporter": self._one(("operator", "dcgm")),
        }

    def _one(self, values: Sequence[Any]) -> Callable[[], Any]:
        return lambda: self.random.choice(values)

    def _some(self, values: Sequence[Any]) -> Callable[[], Any]:
        return lambda: self.random.sample(values, self.random.randint(0, min(3, len(values))))

    def body(self, kind: type) -> dict[str, Any]:
        """JSON values of any meaning."""
        found: dict[str, Any] = self._make(inspect.type_info(kind), "")
        return found

    def report(self, kind: type) -> dict[str, Any]:
        """A report that gets past the door: of the sender's, and in order."""
        self._seq += 1
        found = self.body(kind)
        found |= {"version": WIRE_VERSION, "incarnation": "ix", "sent_at": self.now, "seq": self._seq, "leaves": False}
        found["facts"] |= {"host_id": self.sender}
        found["interval_s"], found["succeeds"] = 1.0, []
        statuses = [
            RankStatus(*self._of_rank(), 1, self.random.choice(tuple(Phase)), self.random.choice((-1, 5, 10**6)), 0.1)
            for _ in range(self.random.randint(0, 3))
        ]
        steps = [RankSteps(*self._of_rank(), 5, (self.now,)) for _ in range(self.random.randint(0, 2))]
        found["workers"], found["progress"] = map(msgspec.to_builtins, in_columns(statuses))
        found["completed"] = msgspec.to_builtins(steps_together(steps))
        for copy in found.get("copies", ()):
            copy["host_id"] = self.random.choice((self.sender, ""))
        for number, signal in enumerate(found.get("signals", ()), 1):
            signal |= {"source": self.sender, "incarnation": "ix", "seq": 1000 * self._seq + number, "at": self.now}
        return found

    def _of_rank(self) -> tuple[str, int, int]:
        return self._meant["job"](), max(0, self._meant["generation"]()), self.random.choice((0, 1, 2))

    def _make(self, kind: inspect.Type, name: str) -> Any:  # noqa: ANN401 - one for each type
        if name in self._meant and self.random.random() > ODD and not isinstance(kind, inspect.StructType):
            return self._meant[name]()
        match kind:
            case inspect.StructType():
                return self._struct(kind)
            case inspect.UnionType():
                return self._make(self.random.choice(kind.types), "")
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return self.random.random() < 0.5
            case inspect.IntType() | inspect.FloatType():
                return self._number(kind)
            case inspect.StrType():
                return "name" if kind.pattern else self.random.choice(TEXTS)[: kind.max_length]
            case inspect.BytesType():
                return "aGVsbG8="
            case inspect.EnumType():
                return self.random.choice([one.value for one in kind.cls])
            case inspect.DictType():
                items = range(self.random.randint(0, 2))
                return {str(self._make(kind.key_type, "job")): self._make(kind.value_type, "") for _ in items}
            case inspect.TupleType():
                return [self._make(one, "") for one in kind.item_types]
            case inspect.VarTupleType() | inspect.ListType():
                return [self._make(kind.item_type, "") for _ in range(self.random.randint(0, 3))]
        return "?"

    def _struct(self, kind: inspect.StructType) -> dict[str, Any]:
        found = {
            field.encode_name: self._make(field.type, field.encode_name)
            for field in kind.fields
            if field.required or self.random.random() < 0.6
        }
        if kind.tag_field is not None:
            found[kind.tag_field] = kind.tag
        return found

    def _number(self, kind: inspect.IntType | inspect.FloatType) -> float:
        values = NUMBERS if isinstance(kind, inspect.IntType) else FLOATS
        if self.random.random() < ODD:
            return self.random.choice(values)
        low = kind.ge if kind.ge is not None else kind.gt if kind.gt is not None else -(2**40)
        high = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else 2**62
        return self.random.choice([one for one in (*values, high) if low <= one <= high] or [low])


def bodies(meanings: Meanings, random: Random) -> tuple[str, str, dict[str, Any] | None]:
    """One request: method, path, body."""
    own = {"host_id": SENDER, "incarnation": "ix"}
    kinds = {"report": 40, "standing": 25, "update": 15, "log": 4, "condition": 8, "end": 4, "poll": 4}
    match random.choices(list(kinds), list(kinds.values()))[0]:
        case "report":
            return "POST", "/v1/reports", meanings.report(Report)
        case "standing":
            return "POST", f"/v1/hosts/{SENDER}/standing", meanings.body(HostStanding) | own
        case "update":
            return "POST", f"/v1/hosts/{SENDER}/updates", meanings.body(CommandUpdate) | own
        case "log":
            return "POST", f"/v1/hosts/{SENDER}/log-pieces", meanings.body(LogPiece) | {"host_id": SENDER}
        case "condition":
            return "POST", f"/v1/hosts/{SENDER}/conditions", meanings.body(ConditionRequest)
        case "end":
            return "DELETE", f"/v1/hosts/{SENDER}/conditions?kind=name&reporter=dcgm", None
    epoch = random.choice((0, 1, 10**6, 2**62))
    return "GET", f"/v1/hosts/{SENDER}/commands?incarnation=ix&wait_s=0&epoch={epoch}&command_id=act-7", None


def test_a_host_without_ranks_may_say_what_it_wants(cluster: TriedSupervisor) -> None:
    random = Random(37)
    ids = [command.command_id for host in cluster.hosts for command in host.got]
    hosts = [host.host_id for host in cluster.hosts]
    meanings = Meanings(random, SENDER, hosts=hosts, jobs=list(JOBS), commands=ids)
    answered: dict[int, int] = {}
    at_first = 0
    for number in range(1, TRIES + 1):
        meanings.now = CLOCK.wall_s()
        method, path, body = bodies(meanings, random)
        content = msgspec.json.encode(body) if body is not None else None
        sent: httpx.Response = cluster.liar.request(method, path, content=content)
        answered[sent.status_code] = answered.get(sent.status_code, 0) + 1
        assert sent.status_code < 500, (sent.text, method, path, body)
        if number % LOOK_EVERY == 0:
            print(number, "tries", flush=True)
            cluster.look()
            at_first = at_first or cluster.memory_bytes
    cluster.look()
    assert cluster.memory_bytes - at_first < MEMORY_BYTES
    print(f"{TRIES} tries: {dict(sorted(answered.items()))}, {cluster.memory_bytes >> 20} MiB")
    assert answered[200] + answered[204] > TRIES / 10, "most of it gets past the door"
