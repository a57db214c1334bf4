"""What a host's daemon reports, made by a test."""

from __future__ import annotations

from collections.abc import Sequence

from flyball.contracts.cluster import HostFacts, RankStatus
from flyball.contracts.reports.rank_columns import RankSteps, in_columns, steps_together
from flyball.contracts.reports.signals import EngineStatus, Report
from flyball.contracts.wire import WIRE_VERSION


def report(
    host_id: str = "host-a",
    sent_at: float = 1_000.0,
    *,
    ranks: Sequence[RankStatus] = (),
    steps: Sequence[RankSteps] = (),
    domain: str = "rack-1",
    **parts: object,
) -> Report:
    """A report of a host that is well. `parts` are its further fields."""
    workers, progress = in_columns(ranks)
    fields = {
        "version": WIRE_VERSION,
        "incarnation": "i1",
        "sent_at": sent_at,
        "interval_s": 1.0,
        "facts": HostFacts(host_id, "127.0.0.1", domain, "127.0.0.1:1", 29_500, "0.1.0", 1),
        "engine": EngineStatus(alive=True),
        "workers": workers,
        "progress": progress,
        "completed": steps_together(steps),
    }
    return Report(**fields | parts)
