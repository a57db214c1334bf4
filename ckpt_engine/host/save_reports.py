"""Remembers what the engine reports about saves: those that training had to wait for, those that failed, and replicas
that differed; and what the ranks' replays showed. Pure."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, NamedTuple

import msgspec

from ckpt_engine.contracts.notices import SaveWaited
from ckpt_engine.rules.storage_plan import EqualBytes, OddReplicas, StoragePlan
from flyball.contracts.on_host.engine_wire import DifferingReplicas, FailingSaves, LateSaves, SaveFailure
from flyball.contracts.reports.training_health import ReplayDiffers
from flyball.contracts.wire import sendable

REPORT_EVERY_S: Final = 60.0  # per rank: with a store that is too slow, every save is late
REMEMBERED_LATE: Final = 64

FAILING_AFTER_S: Final = 60.0  # since the first of two or more failures in a row
REPEAT_S: Final = 300.0
_REMEMBERED_FAILURES: Final = 64
_NAMED_TENSORS: Final = 8  # of those that differ
_NAME_CHARS: Final = 400
_MESSAGE_CHARS: Final = 1_000
_REMEMBERED_TENSORS: Final = 1 << 17


class _SinceReport(msgspec.Struct):
    count: int = 0
    longest_s: float = 0.0
    generation: int = 0  # of the newest save
    step: int = 0
    reported_at: float | None = None


class LateSaveLog:
    """Of one job. A rank's first late save is reported at once, later ones together. Thread-safe."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._ranks: dict[int, _SinceReport] = {}
        self._reports: deque[LateSaves] = deque(maxlen=REMEMBERED_LATE)
        self._lock = threading.Lock()

    def note(self, notice: SaveWaited, now: float) -> None:
        """`now` is wall time. If it was set back, the save is reported at once."""
        with self._lock:
            since = self._ranks.setdefault(notice.rank, _SinceReport())
            since.count += 1
            since.longest_s = max(since.longest_s, notice.waited_s)
            since.generation, since.step = notice.generation, notice.step
            if since.reported_at is None or not 0.0 <= now - since.reported_at < REPORT_EVERY_S:
                self._report(notice.rank, now)

    def report_rest(self, now: float) -> list[LateSaves]:
        """The generation ends, and no later save may trigger a report."""
        with self._lock:
            return [self._report(rank, now) for rank, since in list(self._ranks.items()) if since.count > 0]

    def _report(self, rank: int, now: float) -> LateSaves:
        since = self._ranks[rank]
        report = LateSaves(self._job, since.generation, rank, since.step, since.longest_s, since.count, at=now)
        self._reports.append(report)
        self._ranks[rank] = _SinceReport(reported_at=now)
        return report

    def newest(self) -> list[LateSaves]:
        """The newest reports, oldest first."""
        with self._lock:
            return list(self._reports)


class _Seen(NamedTuple):
    """A tensor that was equal on all ranks at each step compared since it was first seen."""

    step: int  # the newest one
    held: tuple[EqualBytes, ...]
    is_replica: bool  # its bytes changed, and were equal again

    def again(self, step: int, held: tuple[EqualBytes, ...]) -> _Seen:
        is_same_place = [(one.ranks, one.place) for one in self.held] == [(one.ranks, one.place) for one in held]
        changed = is_same_place and all(one.digest != now.digest for one, now in zip(self.held, held, strict=True))
        is_same_ranks = [one.ranks for one in self.held] == [one.ranks for one in held]
        return _Seen(step, held, is_same_ranks and (self.is_replica or changed))


class DifferingLog:
    """Of one job on one host: replicas that differed, once per generation for the same ranks. Thread-safe.

    It also knows at which step each tensor was last equal, over generations: some tensors are meant to differ, and a
    corrupted one was equal before. To be equal once says nothing: a state of zeros at the first step may be each rank's
    own. A tensor is a replica once its bytes changed between two compared steps in a row and were equal at both. Of
    steps that a restart took back, the one that it restored counts.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._generation = -1
        self._known: set[tuple[tuple[int, ...], tuple[int, ...], bool]] = set()
        self._seen: dict[str, _Seen] = {}  # by tensor
        self._reports: deque[DifferingReplicas] = deque(maxlen=_REMEMBERED_FAILURES)
        self._lock = threading.Lock()

    def note(
        self, generation: int, restored: int, step: int, found: StoragePlan, now: float
    ) -> list[DifferingReplicas]:
        """Take in a step that was compared. `restored`: the step that the generation restored, -1 for none; `now` is
        wall time. Returns the reports about ranks that are named for the first time."""
        with self._lock:
            if generation != self._generation:
                self._generation, self._known = generation, set()
                kept = self._seen.items() if restored >= 0 else ()
                self._seen = {name: seen._replace(step=min(seen.step, restored)) for name, seen in kept}
            parted = (odd for odd in found.undecided if self._replicas(odd))
            reports = [self._report(step, odd, now) for odd in (*found.differing, *parted) if self._is_new(odd)]
            self._reports.extend(reports)
            for odd in (*found.differing, *found.undecided):
                for name in odd.tensors:
                    if not self._is_replica(name, odd):
                        self._seen.pop(name, None)
            for name, held in found.equal.items():
                seen = self._seen.get(name)
                if seen is not None and step > seen.step:
                    self._seen[name] = seen.again(step, held)
                elif seen is None and len(self._seen) < _REMEMBERED_TENSORS:
                    self._seen[name] = _Seen(step, held, is_replica=False)
            return reports

    def clean_step(self, generation: int, known: int | None) -> int | None:
        """The newest step that is not suspect, because replicas of this generation differ or by what is `known`
        otherwise; None if none is suspect."""
        with self._lock:
            mine = (found for found in self._reports if found.generation == generation)
            harms = [found.equal_step for found in mine if found.equal_step >= 0]
        return min(harms if known is None else (known, *harms), default=None)

    def _is_replica(self, name: str, odd: OddReplicas) -> bool:
        """Whether just these ranks held the tensor alike. Others may be meant to differ: of ranks that train apart,
        some may have been compared without the rest."""
        seen, ranks = self._seen.get(name), tuple(sorted((*odd.agree, *odd.differ)))
        return seen is not None and seen.is_replica and any(held.ranks == ranks for held in seen.held)

    def _is_new(self, odd: OddReplicas) -> bool:
        """Whether these ranks were not reported yet. Ranks with tensors that were meant to differ may get others."""
        key = odd.agree, odd.differ, bool(self._replicas(odd))
        is_new = key not in self._known
        self._known.add(key)
        return is_new

    def _report(self, step: int, odd: OddReplicas, now: float) -> DifferingReplicas:
        """Only the tensors that are replicas, if any is: others may be meant to differ."""
        replicas = self._replicas(odd)
        tensors = replicas or odd.tensors
        equal_step = min((self._seen[name].step for name in replicas), default=-1)
        ranks = (odd.agree, odd.differ)
        named = tuple(sendable(name, _NAME_CHARS) for name in tensors[:_NAMED_TENSORS])
        return DifferingReplicas(self._job, self._generation, step, named, len(tensors), *ranks, now, equal_step)

    def _replicas(self, odd: OddReplicas) -> tuple[str, ...]:
        return tuple(name for name in odd.tensors if self._is_replica(name, odd))

    def newest(self) -> list[DifferingReplicas]:
        """Oldest first."""
        with self._lock:
            return list(self._reports)


class ReplayLog:
    """Of one job on one host: what its ranks' replays showed. Thread-safe."""

    def __init__(self) -> None:
        self._equal = (-1, -1)  # generation and newest step at which no rank's replay differed
        self._reports: deque[ReplayDiffers] = deque(maxlen=_REMEMBERED_FAILURES)

    def equal(self, generation: int, step: int) -> None:
        self._equal = (generation, step)

    def differed(self, found: ReplayDiffers) -> None:
        self._reports.append(found)

    def proven_step(self, generation: int) -> int | None:
        """The newest step of this generation at which no rank's replay differed, None if there was none."""
        of, step = self._equal
        return step if of == generation else None

    def newest(self) -> list[ReplayDiffers]:
        """Oldest first."""
        return list(self._reports)


class _RankFailures(msgspec.Struct):
    """One rank's failures since its last successful save."""

    since: float
    count: int = 0
    step: int = -1
    message: str = ""


class SaveFailures:
    """Of one job on one host. Times are wall clock; one that was set back delays reports. Thread-safe."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._generation = -1
        self._remembered: deque[SaveFailure] = deque(maxlen=_REMEMBERED_FAILURES)
        self._rows: dict[int, _RankFailures] = {}
        self._report: FailingSaves | None = None
        self._reported_at = 0.0
        self._lock = threading.Lock()

    def begin(self, generation: int) -> None:
        """Forget how saves went in the generation before."""
        with self._lock:
            self._generation, self._report = generation, None
            self._rows.clear()

    def remember(self, failure: SaveFailure) -> None:
        """A failure in any tier, for `newest`."""
        self._remembered.append(self._as_shown(failure))

    def newest(self) -> list[SaveFailure]:
        """Oldest first."""
        return list(self._remembered)

    def failed(self, failure: SaveFailure) -> None:
        """The rank will never have this step in memory."""
        failure = self._as_shown(failure)
        self._remembered.append(failure)
        with self._lock:
            if failure.generation == self._generation:
                row = self._rows.setdefault(failure.rank, _RankFailures(failure.at))
                row.count += 1
                row.step, row.message = max(row.step, failure.step), failure.message

    @staticmethod
    def _as_shown(failure: SaveFailure) -> SaveFailure:
        return msgspec.structs.replace(failure, message=sendable(failure.message, _MESSAGE_CHARS))

    def kept(self, rank: int, newest_step: int, now: float) -> None:
        """The rank has this step committed and replicated."""
        with self._lock:
            row = self._rows.get(rank)
            if row is not None and newest_step > row.step:
                del self._rows[rank]
            if self._report is None and newest_step >= 0:
                # After an engine restart: the engine before may have reported failures.
                self._make_report((), _RankFailures(0.0, step=newest_step), now)

    def failing(self, now: float) -> FailingSaves | None:
        """The report, the same until something changes. None while nothing is known."""
        with self._lock:
            long = {r: row for r, row in self._rows.items() if row.count > 1 and now - row.since >= FAILING_AFTER_S}
            before = self._report.ranks if self._report else ()
            if tuple(sorted(long)) != before or (long and now - self._reported_at >= REPEAT_S):
                first = min(long.values(), key=lambda row: row.since, default=None)
                self._make_report(tuple(sorted(long)), first or self._over(), now)
            return self._report

    def _over(self) -> _RankFailures:
        assert self._report is not None  # ranks were reported to fail
        return _RankFailures(self._report.since, self._report.count, self._report.step)

    def _make_report(self, ranks: tuple[int, ...], row: _RankFailures, now: float) -> None:
        self._report = FailingSaves(self._job, self._generation, ranks, row.since, row.count, row.step, row.message)
        self._reported_at = now
