"""The ranks of a job on one host, in columns like those of a report: one entry per rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flyball.contracts.cluster import Activity, Phase
from flyball.contracts.reports.rank_columns import RankProgress, phases_of

# In these phases a rank completes no step, so the time between two steps says nothing about how long a step takes.
APART_FROM_STEPS = frozenset({Phase.EVAL, Phase.OTHER, Phase.PARKED})


class RankEntries(NamedTuple):
    """The entries of one rank, for ranks that join or leave the columns of a host. Moments are in the sensor's time."""

    phase: Phase
    step: int
    age_s: float  # of its beacon
    moved_s: float  # kept up until the ranks of the host have completed their first step
    entered_s: float  # when its phase began
    first_step: int  # that this sensor saw in this generation
    has_stepped: bool  # completed a step in this generation
    forgiven_s: float  # part of the age that does not count
    doing: tuple[Activity, str]  # activity and system call, as the job counts them


class WatchedRanks:
    """The columns of a host's last report, and what it and those before it imply, in the order of `numbers`."""

    __slots__ = (
        "are_all_stepped",
        "are_apart",
        "are_forgiven",
        "doing",
        "entered_s",
        "first_steps",
        "forgiven_s",
        "has_stepped",
        "host_id",
        "moved_s",
        "numbers",
        "progress",
        "seen_s",
    )

    def __init__(self, host_id: str, numbers: Sequence[int], rows: Iterable[RankEntries], seen_s: float) -> None:
        self.host_id = host_id
        self.numbers = numbers
        self.seen_s = seen_s  # the last report, until all have completed their first step
        phases, steps, ages_s, moved_s, entered_s, first_steps, has_stepped, forgiven_s, doing = zip(*rows, strict=True)
        self.progress = RankProgress(phases, steps, ages_s)
        self.moved_s: list[float] = list(moved_s)
        self.entered_s: list[float] = list(entered_s)
        self.first_steps: list[int] = list(first_steps)
        self.has_stepped: list[bool] = list(has_stepped)
        self.forgiven_s: list[float] = list(forgiven_s)
        self.doing: list[tuple[Activity, str]] = list(doing)
        self.are_all_stepped = all(has_stepped)
        self.are_forgiven = any(forgiven_s)  # at least one of them
        self.are_apart = not APART_FROM_STEPS.isdisjoint(phases)

    def rows(self) -> dict[int, RankEntries]:
        """rank -> its entries."""
        reported = (phases_of(self.progress), self.progress.steps, self.progress.beacon_ages_s)
        implied = (self.moved_s, self.entered_s, self.first_steps, self.has_stepped, self.forgiven_s, self.doing)
        return dict(zip(self.numbers, map(RankEntries, *reported, *implied), strict=True))

    def step(self, number: int) -> int:
        """The newest completed step of this rank."""
        return self.progress.steps[self.numbers.index(number)]

    def moved(self, progress: RankProgress) -> list[bool]:
        """Find the ranks that have moved since the last report, by the columns of a new one."""
        before = self.progress
        phases, steps = (phases_of(progress), phases_of(before)), (progress.steps, before.steps)
        columns = zip(*steps, progress.beacon_ages_s, before.beacon_ages_s, *phases, strict=True)
        return [
            step != step_before or age_s < age_before_s or phase is not phase_before
            for step, step_before, age_s, age_before_s, phase, phase_before in columns
        ]

    def forgive(self, lagged_s: float, has_moved: Sequence[bool]) -> None:
        """Do not count this time, in which their daemon was held up, against ranks that move no more until they do."""
        ages = zip(has_moved, self.forgiven_s, strict=True)
        self.forgiven_s = [lagged_s if moved else lagged_s + forgiven_s for moved, forgiven_s in ages]
        self.are_forgiven = any(self.forgiven_s)

    def note_stepped(self, have_stepped: Iterable[bool]) -> None:
        """Remember which ranks completed a step in this generation, besides those that are known to have."""
        self.has_stepped = [known or new for known, new in zip(self.has_stepped, have_stepped, strict=True)]
        self.are_all_stepped = all(self.has_stepped)
