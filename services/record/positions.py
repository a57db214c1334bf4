"""The positions of a host's ranks in one document per host: rows per rank would be eight times as many. Those of hosts
that report nothing but newer positions are in one document per some hundred hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


def kept(rows: Mapping[RankKey, RankRow], newest: Mapping[str, int]) -> dict[RankKey, RankRow]:
    """The ranks that a document keeps, in its order: those of the generations in `newest`. The event log has what
    others did."""
    parts: dict[tuple[str, int], dict[RankKey, RankRow]] = {}
    for key, row in rows.items():
        if newest.get(key[0]) == key[1] and (row.reported_at or row.step >= 0):
            parts.setdefault(key[:2], {})[key] = row
    return {key: row for ranks in parts.values() for key, row in ranks.items()}


def document_of(rows: Mapping[RankKey, RankRow]) -> str:
    """The document of the ranks that `kept` returns."""
    parts: dict[tuple[str, int], list[ReportedPosition]] = {}
    for (job, generation, rank), row in rows.items():
        position = ReportedPosition(
            rank, row.pid, row.step, row.phase, row.reported_at, row.is_gone, row.moved_at, row.stand
        )
        parts.setdefault((job, generation), []).append(position)
    return dump([JobPositions(job, generation, tuple(ranks)) for (job, generation), ranks in parts.items()])


AS_STORED = -2  # a rank that the report does not tell of


class SteadyPositions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A newer report of a host that told nothing but newer positions. It goes with one version of the host's row: with
    any other it means nothing."""

    host_id: str
    version: int
    sent_at: float
    received_at: float
    steps: tuple[int, ...]  # of the ranks in the row, in order; a single one: of all
    still_s: float = 0.0  # for how long the rank that moved last had not moved

    def step(self, place: int) -> int:
        """The step of a rank, by its place in the row."""
        return self.steps[place if len(self.steps) > 1 else 0]

    @property
    def at(self) -> tuple[float, float]:
        return self.received_at, self.sent_at


def read_steady(document: str) -> list[SteadyPositions]:
    steady: list[SteadyPositions] = load(document, list[SteadyPositions])
    return steady


def moved(rows: Iterable[RankRow], newer: SteadyPositions) -> None:
    """Take in newer positions. `rows`: of the ranks in the host's row, in order."""
    for place, row in enumerate(rows):
        if (step := newer.step(place)) != AS_STORED:
            row.step, row.reported_at, row.moved_at = step, newer.received_at, newer.received_at - newer.still_s


def moved_parts(parts: Sequence[JobPositions], newer: SteadyPositions) -> list[JobPositions]:
    """The positions of a host's row with newer ones."""
    rows = rows_of(parts, newer.host_id)
    moved(rows.values(), newer)
    return read_positions(document_of(rows))
