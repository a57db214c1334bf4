"""Finds the hosts that can see whether another one is alive, and reads what they report about it. Pure.

Witnesses are the hosts whose engines have a link with the host's engine: those that hold its replicas, those whose
replicas it holds, and rank 0's, which is linked with all. They report by themselves that they cannot reach a host, and
when asked that they can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from flyball.contracts.cluster import HostRanks
from flyball.contracts.reports.signals import PeerUnreachable, Report
from flyball.contracts.reports.testimony import MAX_ASKED

MAX_NEIGHBOURS = 4


def neighbours(hosts: Sequence[HostRanks], peers: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """host -> up to MAX_NEIGHBOURS hosts to ask about it, the nearest in the ring first."""
    names = [part.host_id for part in hosts]
    first = next((part.host_id for part in hosts if 0 in part.ranks), "")
    owners: dict[str, list[str]] = {name: [] for name in names}
    for owner in names:
        for holder in peers.get(owner, ()):
            owners.setdefault(holder, []).append(owner)
    found = {}
    for position, name in enumerate(names):
        wanted = [*peers.get(name, ())[:2], *owners[name][:2], first]
        if name == first:  # every other engine has a link with this one
            wanted += names[position + 1 : position + 1 + MAX_NEIGHBOURS] + names[:MAX_NEIGHBOURS]
        unique = dict.fromkeys(w for w in wanted if w and w != name)
        found[name] = tuple(unique)[:MAX_NEIGHBOURS]
    return found


class Witnesses:
    """Accusations (unreachable) and testimonies (alive) from reports, and the questions to send with the replies."""

    def __init__(self) -> None:
        self._neighbours: Mapping[str, tuple[str, ...]] = {}
        self._accused: dict[str, frozenset[str]] = {}
        self._accusers: dict[str, set[str]] = {}
        self._questions: dict[str, tuple[str, ...]] = {}
        self._asked: dict[str, dict[str, float]] = {}  # suspect -> witness -> since when it is asked
        self._testified: dict[str, dict[str, float]] = {}  # suspect -> witness -> when the suspect was alive

    def set_neighbours(self, known: Mapping[str, tuple[str, ...]]) -> None:
        """host -> the hosts to ask about it from now on."""
        self._neighbours = known

    def observe(self, report: Report, now_s: float) -> None:
        """Take in what a host's newest report says about others."""
        witness, engine = report.facts.host_id, report.engine
        if report.signals or engine.unreachable_peers or witness in self._accused:
            self._accuse(witness, report)
        for testimony in engine.testimonies:
            alive = self._testified.get(testimony.peer)
            if alive is None or testimony.daemon_s is None or testimony.peer == witness:
                continue  # it was not asked about, or its engine has outlived its daemon
            if witness not in self._asked.get(testimony.peer, ()) and witness not in alive:
                continue  # it was not asked
            alive_s = now_s - testimony.engine_s - testimony.daemon_s
            alive[witness] = max(alive_s, alive.get(witness, alive_s))

    def ask_about(self, suspects: Iterable[str], now_s: float) -> None:
        """Ask about these from now on, and about no others. A witness that is late itself is asked too: the question
        goes out with the reply to its next report. Otherwise nobody would be asked where all reports are late."""
        questions: dict[str, tuple[str, ...]] = {}
        testified: dict[str, dict[str, float]] = {}
        since: dict[str, dict[str, float]] = {}
        for suspect in suspects:
            testified[suspect] = self._testified.get(suspect, {})
            before = self._asked.get(suspect, {})
            since[suspect] = {}
            for witness in self._neighbours.get(suspect, ()):
                asked = questions.get(witness, ())
                if len(asked) < MAX_ASKED:
                    questions[witness] = (*asked, suspect)
                    since[suspect][witness] = before.get(witness, now_s)
        self._questions, self._testified, self._asked = questions, testified, since

    def questions(self, host_id: str) -> tuple[str, ...]:
        """The hosts that this one should be asked about."""
        return self._questions.get(host_id, ())

    def all_asked_since(self, host_id: str) -> float:
        """Since when all witnesses of a suspect are asked; -inf if it has none. Its job may just have got others."""
        return max(self._asked.get(host_id, {}).values(), default=-inf)

    def accusers(self, host_id: str, doubtful: Collection[str]) -> list[str]:
        """The witnesses that cannot reach a host, without the doubtful ones. Only its neighbours have a link to it."""
        accusers = self._accusers.get(host_id, set())
        if self._neighbours:  # they are known
            accusers = accusers.intersection(self._neighbours.get(host_id, ()))
        return sorted(accusers.difference(doubtful))

    def testified(self, host_id: str) -> Mapping[str, float]:
        """witness -> when the suspect was last alive. A witness that is late by now counts: testimonies age anyway."""
        return self._testified.get(host_id, {})

    def forget(self, host_id: str) -> None:
        """Drop a host's accusations."""
        for peer in self._accused.pop(host_id, ()):
            self._acquit(peer, host_id)

    def __len__(self) -> int:
        return sum(map(len, self._accusers.values())) + sum(map(len, self._testified.values()))

    def _accuse(self, witness: str, report: Report) -> None:
        named = {signal.body.peer for signal in report.signals if isinstance(signal.body, PeerUnreachable)}
        accused = frozenset(named.union(report.engine.unreachable_peers)) - {witness}
        before = self._accused.get(witness, frozenset())
        for peer in before - accused:
            self._acquit(peer, witness)
        for peer in accused - before:
            self._accusers.setdefault(peer, set()).add(witness)
        if accused:
            self._accused[witness] = accused
        else:
            self._accused.pop(witness, None)

    def _acquit(self, peer: str, accuser: str) -> None:
        accusers = self._accusers[peer]
        accusers.discard(accuser)
        if not accusers:
            del self._accusers[peer]
