"""The positions of a host's ranks in one document per host: rows per rank would be eight times as many. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from flyball.contracts.reports.rank_stands import RankStand
from services.record.codec import dump, load
from services.record.report_events import RankKey, RankRow


class ReportedPosition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The newest report of a host about a rank; `reported_at` 0.0: only completed steps."""

    rank: int
    pid: int
    step: int
    phase: int
    reported_at: float
    is_gone: bool = False
    moved_at: float = 0.0
    stand: RankStand | None = None


class JobPositions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The ranks of one generation, including those that ended."""

    job: str
    generation: int
    ranks: tuple[ReportedPosition, ...]


def read_positions(document: str) -> list[JobPositions]:
    positions: list[JobPositions] = load(document, list[JobPositions])
    return positions


def rows_of(positions: Iterable[JobPositions], host_id: str) -> dict[RankKey, RankRow]:
    """The rows for `report_events.merge`."""
    return {
        (part.job, part.generation, rank.rank): RankRow(
            host_id=host_id,
            pid=rank.pid,
            step=rank.step,
            phase=rank.phase,
            reported_at=rank.reported_at,
            is_gone=rank.is_gone,
            moved_at=rank.moved_at,
            stand=rank.stand,
        )
        for part in positions
        for rank in part.ranks
    }


def document_of(rows: Mapping[RankKey, RankRow], newest: Mapping[str, int]) -> str:
    """The document: the ranks of the generations in `newest`. The event log has what others did."""
    parts: dict[tuple[str, int], list[ReportedPosition]] = {}
    for (job, generation, rank), row in rows.items():
        if newest.get(job) == generation and (row.reported_at or row.step >= 0):
            position = ReportedPosition(
                rank, row.pid, row.step, row.phase, row.reported_at, row.is_gone, row.moved_at, row.stand
            )
            parts.setdefault((job, generation), []).append(position)
    return dump([JobPositions(job, generation, tuple(ranks)) for (job, generation), ranks in parts.items()])
