"""What must hold in the database of a control plane and in the records of its hosts, whoever was killed."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from support.clocks.waits import DEADLINE_S, until
from support.jobs.recovered import RecordedJob

from host_daemon.store.outbox import COMMITTED_FACT


def reading(path: Path) -> sqlite3.Connection:
    """A database that others write to, and may be held up in the middle of it."""
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=DEADLINE_S)


class Ledger:
    """Reads the supervisor's database, and the hosts' own records, from outside."""

    def __init__(self, job: RecordedJob) -> None:
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
        until(lambda: not self.count("SELECT count(*) FROM commands WHERE progress < 2"), "every command is answered")
        written = self.rows("SELECT command_id, host_id, progress, answer FROM commands")
        for command_id, _, progress, answer in written:
            assert progress == 2, f"{command_id} has no final answer"
            assert msgspec.json.decode(answer)["state"] == "succeeded", command_id
            assert command_id.endswith(".1"), f"{command_id} repeats another command"
        for host in self.job.stack.hosts.values():
            asked = sorted(command_id for command_id, host_id, *_ in written if host_id == host.host_id)
            until(
                lambda host=host, asked=asked: len(host.logged("answer")) >= len(asked), "it knows that it has answered"
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

        until(spools_are_committed, "nothing uncommitted in any spool")
        numbered = self.rows("SELECT source, incarnation, seq FROM signals ORDER BY seq")
        for host in hosts:
            incarnations = {incarnation for source, incarnation, _ in numbered if source == host.host_id}
            for incarnation in incarnations:
                numbers = [seq for _, i, seq in numbered if i == incarnation]
                assert numbers == list(range(1, len(numbers) + 1))

    def _events(self, kind: str) -> int:
        return self.count("SELECT count(*) FROM events WHERE kind = ?", kind)
