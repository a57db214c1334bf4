"""The hosts of a fleet as they truly are: those of the job, free ones, and broken ones. No operation looks at all."""

from __future__ import annotations

from random import Random

import msgspec


class TrueHost(msgspec.Struct, eq=False):
    """One host."""

    name: str
    rack: str
    is_up: bool = True
    has_memory: bool = True  # its memory survived since the job's ranks last started there
    condition: str = ""  # a defect that its probes report; ''
    is_lemon: bool = False
    has_relapse: bool = False  # its last repair did not hold
    downs: int = 0  # a repair that is overtaken by another fault does not count


class Pool:
    """A set of hosts with constant-time changes and draws; the same draws give the same hosts in every process."""

    def __init__(self) -> None:
        self._hosts: list[TrueHost] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def __contains__(self, host: TrueHost) -> bool:
        return host.name in self._places

    def add(self, host: TrueHost) -> None:
        """Add a host that is not there."""
        if host.name not in self._places:
            self._places[host.name] = len(self._hosts)
            self._hosts.append(host)

    def remove(self, host: TrueHost) -> None:
        """Take a host out; the last one takes its place."""
        place = self._places.pop(host.name, None)
        if place is None:
            return
        last = self._hosts.pop()
        if last is not host:
            self._hosts[place] = last
            self._places[last.name] = place

    def draw(self, rng: Random, lemon_factor: float) -> TrueHost | None:
        """A random host; lemons are `lemon_factor` times as likely as others."""
        while self._hosts:
            host = self._hosts[int(rng.random() * len(self._hosts))]
            if lemon_factor == 1.0 or host.is_lemon or rng.random() * lemon_factor < 1.0:
                return host
        return None

    def first(self, count: int) -> list[TrueHost]:
        """Some of them, always the same ones."""
        return self._hosts[:count]
