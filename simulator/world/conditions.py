"""What is wrong with a simulated host, and what its daemon reports of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flyball.contracts.reports.conditions import ConditionKey, HostCondition
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded, SignalBody
from host_daemon.store.condition_book import what_stands

if TYPE_CHECKING:
    from simulator.world.host import Host

SOURCE = "simulated"


def _is_beginning(key: ConditionKey, body: SignalBody) -> bool:
    return isinstance(body, ConditionBegan) and body.condition.key == key


class Conditions:
    """Of one host. What was reported survives on its disk."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._standing: dict[ConditionKey, HostCondition] = {}  # whether a daemon looks or not
        self._reported: dict[ConditionKey, HostCondition] = {}

    def begin(self, condition: HostCondition) -> None:
        """Something is wrong with the host. Its daemon reports it, now or when it is back."""
        self._standing[condition.key] = condition
        self.report()

    def end(self, condition: HostCondition) -> None:
        """That is over."""
        self._standing.pop(condition.key, None)
        self.report()

    def report(self) -> None:
        """Report what is news, if a daemon runs."""
        if not self._host.is_daemon_up:
            return
        for key in sorted(self._reported.keys() - self._standing.keys()):
            self._host.put(ConditionEnded(*key))
            self._host.repeat(partial(_is_beginning, key))
        for key in sorted(self._standing.keys() - self._reported.keys()):
            self._host.put(ConditionBegan(self._standing[key]))
        self._reported = dict(self._standing)

    def say_what_stands(self) -> None:
        """To another database."""
        for condition in self._reported.values():
            self._host.put(ConditionBegan(condition))
        self._host.put(what_stands((SOURCE,), self._reported))
