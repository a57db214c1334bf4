"""Who can tell whether a host lives, and what they told. Pure.

Witnesses are the hosts whose engines have a link with the host's: the holders of its replicas, those whose replicas it
holds, and the engine of rank 0, which has one with everybody. That they cannot reach it they say by themselves; that
they can, they say when asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flyball.contracts.cluster import HostRanks
from flyball.contracts.reports.signals import PeerUnreachable, Report
from flyball.contracts.reports.testimony import MAX_ASKED

MAX_NEIGHBOURS = 4


def neighbours(hosts: Sequence[HostRanks], peers: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """host -> those to ask about it, nearest in the ring first; at most MAX_NEIGHBOURS."""
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
    """Accusations and testimonies as they come with reports, and the questions that go back with the replies."""

    def __init__(self) -> None:
        self._neighbours: Mapping[str, tuple[str, ...]] = {}
        self._accused: dict[str, frozenset[str]] = {}
        self._accusers: dict[str, set[str]] = {}
        self._questions: dict[str, tuple[str, ...]] = {}
        self._heard: dict[str, dict[str, float]] = {}  # of hosts that are asked about: witness -> when it was alive

    def set_neighbours(self, known: Mapping[str, tuple[str, ...]]) -> None:
        """Whom to ask about each host from now on."""
        self._neighbours = known

    def hear(self, report: Report, now_s: float) -> None:
        """Take in what a host's newest report says of others."""
        witness, engine = report.facts.host_id, report.engine
        if report.signals or engine.unreachable_peers or witness in self._accused:
            self._accuse(witness, report)
        for testimony in engine.testimonies:
            told = self._heard.get(testimony.peer)
            if told is None or testimony.daemon_s is None or testimony.peer == witness:
                continue  # nobody asked about it, or its engine has outlived its daemon
            alive_s = now_s - testimony.engine_s - testimony.daemon_s
            told[witness] = max(alive_s, told.get(witness, alive_s))

    def ask_about(self, suspects: Iterable[str]) -> None:
        """These are asked about from now on, and no others. Who is late himself is asked too: the question goes out
        with the reply to his next report, and then he is not. Else nobody would be where all reports come late."""
        questions: dict[str, tuple[str, ...]] = {}
        heard: dict[str, dict[str, float]] = {}
        for suspect in suspects:
            heard[suspect] = self._heard.get(suspect, {})
            for witness in self._neighbours.get(suspect, ()):
                asked = questions.get(witness, ())
                if len(asked) < MAX_ASKED:
                    questions[witness] = (*asked, suspect)
        self._questions, self._heard = questions, heard

    def questions(self, host_id: str) -> tuple[str, ...]:
        """The hosts that this one is asked about."""
        return self._questions.get(host_id, ())

    def accusers(self, host_id: str, doubtful: Collection[str]) -> list[str]:
        """Who cannot reach a host, and is not doubtful itself."""
        return sorted(self._accusers.get(host_id, set()).difference(doubtful))

    def heard(self, host_id: str) -> Mapping[str, float]:
        """Who heard of a host that is asked about -> when it was alive for the last time. Also who is late himself by
        now: what he said while he was not grows old by itself."""
        return self._heard.get(host_id, {})

    def forget(self, host_id: str) -> None:
        """Drop a host's accusations."""
        for peer in self._accused.pop(host_id, ()):
            self._acquit(peer, host_id)

    def __len__(self) -> int:
        return sum(map(len, self._accusers.values())) + sum(map(len, self._heard.values()))

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
