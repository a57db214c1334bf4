"""The control plane as four processes over one database, behind one address; and what must hold in that database."""

from __future__ import annotations

import http.client
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recovery_processes import DEADLINE_S, PATIENT, until

from host_daemon.store.outbox import COMMITTED_FACT

PASSED_ON = ("Authorization", "Content-Type", "Retry-After")
TIMEOUT_S = 60.0  # longer than a long poll


class Ingress:
    """What stands before the parts in a cluster: sends each request to the part that serves its path. When that part is
    away or dies while it answers, the connection ends without an answer, as the part's own would."""

    def __init__(self, port_of: Callable[[str], int]) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {k: v for k, v in self.headers.items() if k in PASSED_ON}
                with closing(http.client.HTTPConnection("127.0.0.1", port_of(part_of(self.path)), TIMEOUT_S)) as part:
                    try:
                        part.request(self.command, self.path, body, headers)
                        answer = part.getresponse()
                        content = answer.read()
                    except (OSError, http.client.HTTPException):
                        self.close_connection = True
                        return
                self.send_response(answer.status)
                for name in PASSED_ON[1:]:
                    if value := answer.getheader(name):
                        self.send_header(name, value)
                if answer.status != 204:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                return  # who asked has gone

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def part_of(path: str) -> str:
    if path.startswith("/v1/reports"):
        return "sensor"
    return "actuator" if path.startswith("/v1/hosts/") else "api"


def reading(path: Path) -> sqlite3.Connection:
    """A database that others write to, and may be held up in the middle of it."""
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=DEADLINE_S)


class Ledger:
    """Reads the supervisor's database, and the hosts' own records, from outside."""

    def __init__(self, job) -> None:  # type: ignore[no-untyped-def]  # a class of the outer conftest
        self.job = job
        self._path = job.stack.root / "flyball.sqlite"

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with closing(reading(self._path)) as connection:
            return connection.execute(query, values).fetchall()

    def count(self, query: str, *values: object) -> int:
        return int(self.rows(query, *values)[0][0])

    @property
    def decisions(self) -> int:
        return self.count("SELECT count(*) FROM decisions WHERE kind != 'hold'")

    @property
    def signals(self) -> int:
        return self.count("SELECT count(*) FROM signals")

    @property
    def waiting(self) -> int:
        """Signals that the controller has not taken yet."""
        return self.count("SELECT count(*) FROM bus_messages WHERE position > (SELECT position FROM cursors)")

    @property
    def epoch(self) -> int:
        return self.count("SELECT epoch FROM lease")

    def check_nothing_was_lost_or_done_twice(self) -> None:
        """The whole history of the job, whoever was killed in it."""
        self._check_decisions()
        self._check_commands()
        self._check_generations()
        self._check_signals()

    def _check_decisions(self) -> None:
        incidents = self.rows("SELECT number, state FROM incidents ORDER BY number")
        assert {state for _, state in incidents} == {"resolved"}
        decided = self.rows("SELECT number, incident, kind, epoch FROM decisions ORDER BY number")
        assert [number for number, *_ in decided] == list(range(1, len(decided) + 1)), "no decision is missing"
        assert [epoch for *_, epoch in decided] == sorted(epoch for *_, epoch in decided)
        acting = Counter(incident for _, incident, kind, _ in decided if incident is not None and kind != "hold")
        assert acting == {number: 1 for number, _ in incidents}, "one decision per incident and cause"
        actions = dict(self.rows("SELECT number, state FROM actions"))
        assert actions == {number: "succeeded" for number, _, kind, _ in decided if kind != "hold"}
        assert self._events("decision") == len(decided)
        assert self._events("incident_opened") == self._events("incident_closed") == len(incidents)

    def _check_commands(self) -> None:
        # A warm standby is waited for by nobody: on a slow machine its command ends long after its action.
        until("every command is answered", lambda: not self.count("SELECT count(*) FROM commands WHERE progress < 2"))
        written = self.rows("SELECT command_id, host_id, progress, answer FROM commands")
        for command_id, _, progress, answer in written:
            assert progress == 2, f"{command_id} has no final answer"
            assert msgspec.json.decode(answer)["state"] == "succeeded", command_id
            assert command_id.endswith(".1"), f"{command_id} repeats another command"
        for host in self.job.stack.hosts.values():
            asked = sorted(command_id for command_id, host_id, *_ in written if host_id == host.host_id)
            until(
                "it knows that it has answered", lambda host=host, asked=asked: len(host.logged("answer")) >= len(asked)
            )
            assert sorted(line["id"] for line in host.logged("command")) == asked, "each is obeyed once"
            assert {line["state"] for line in host.logged("command")} == {"new"}
            assert sorted(line["id"] for line in host.logged("answer")) == asked, "each is answered once"
            with closing(reading(host.state_dir / "daemon.sqlite")) as journal:
                kept = journal.execute("SELECT command_id, answer FROM commands ORDER BY command_id").fetchall()
            assert [command_id for command_id, _ in kept] == asked
            assert {msgspec.json.decode(answer)["state"] for _, answer in kept} == {"succeeded"}

    def _check_generations(self) -> None:
        granted = self.rows("SELECT generation, decision, started_at FROM generations ORDER BY generation")
        assert [generation for generation, *_ in granted] == list(range(1, len(granted) + 1))
        assert len({decision for _, decision, _ in granted}) == len(granted)
        assert all(started_at > 0.0 for *_, started_at in granted)
        assert self._events("generation_granted") == self._events("generation_started") == len(granted)
        spawned = Counter((generation, rank) for generation, rank, _ in self.job.spawns())
        ranks = range(self.job.world_size)
        assert spawned == {(generation, rank): 1 for generation, *_ in granted for rank in ranks}

    def _check_signals(self) -> None:
        """What the daemons numbered is stored without a gap, and their spools hold nothing else."""
        hosts = self.job.stack.hosts.values()

        def spools_are_committed() -> bool:
            for host in hosts:
                with closing(reading(host.state_dir / "daemon.sqlite")) as spool:
                    fact = spool.execute("SELECT value FROM facts WHERE name = ?", (COMMITTED_FACT,)).fetchone()
                    upto = msgspec.json.decode(fact[0]) if fact else {}
                    spooled = spool.execute("SELECT incarnation, seq FROM signals").fetchall()
                if any(seq > upto.get(incarnation, 0) for incarnation, seq in spooled):
                    return False
            return True

        self.job.stack.until("nothing uncommitted in any spool", spools_are_committed)
        numbered = self.rows("SELECT source, incarnation, seq FROM signals ORDER BY seq")
        for host in hosts:
            incarnations = {incarnation for source, incarnation, _ in numbered if source == host.host_id}
            for incarnation in incarnations:
                numbers = [seq for _, i, seq in numbered if i == incarnation]
                assert numbers == list(range(1, len(numbers) + 1))

    def _events(self, kind: str) -> int:
        return self.count("SELECT count(*) FROM events WHERE kind = ?", kind)


@pytest.fixture(scope="module")
def job(make_stack, make_part) -> Iterator[Any]:
    """Two ranks on two hosts, supervised by four processes."""
    stack = make_stack(FLYBALL_LEASE_TTL_S="2.0", **PATIENT)
    for name in ("api", "sensor", "controller", "actuator"):
        stack.parts[name] = make_part(stack, name)
    ingress = Ingress(lambda name: int(stack.parts[name].port))
    stack.daemons_url = ingress.url
    for part in stack.parts.values():
        part.launch()
    for part in stack.parts.values():
        part.wait_up()
    stack.add_hosts("host-a", "host-b")
    yield stack.train("apart", nnodes=2, nproc_per_node=1)
    ingress.close()


@pytest.fixture
def ledger(job) -> Ledger:
    return Ledger(job)
