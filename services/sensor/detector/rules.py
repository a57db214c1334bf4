"""What the state in a report says beyond its signals: state is repeated in every report, a signal comes once per
episode."""

from __future__ import annotations

from flyball.contracts.signals import PeerUnreachable, Report, SignalBody


class PeerRules:
    """Turns the set of peers that an engine cannot reach into one PeerUnreachable per peer and episode."""

    def __init__(self) -> None:
        self._unreachable: dict[str, frozenset[str]] = {}

    def observe(self, report: Report) -> list[SignalBody]:
        """Signals for peers that this report is the first to name; nothing for those that its daemon names itself."""
        host_id = report.facts.host_id
        if not report.engine.unreachable_peers and host_id not in self._unreachable:
            return []  # as nearly always
        now = frozenset(report.engine.unreachable_peers) - {host_id}
        before = self._unreachable.get(host_id, frozenset())
        said = {signal.body.peer for signal in report.signals if isinstance(signal.body, PeerUnreachable)}
        if now:
            self._unreachable[host_id] = now
        else:
            self._unreachable.pop(host_id, None)
        return [
            PeerUnreachable(peer=peer, message=f"The engine of {host_id} lost {peer} and cannot connect to it again.")
            for peer in sorted(now - before - said)
        ]

    def __len__(self) -> int:
        return len(self._unreachable)

    def forget(self, host_id: str) -> None:
        """Drop what is remembered of a host."""
        self._unreachable.pop(host_id, None)
