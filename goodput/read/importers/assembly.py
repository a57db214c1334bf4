"""Turns a log's records into the events of every job in it. Pure.

A generation begins with the start of a process (of a node that started before, or after steps), with the loading of a
checkpoint after steps, or when a rank's step number does not grow within a file. Each generation after steps answers an
incident with the cause `restart`. It is `inferred`: nothing shows when it began, so the time before the restart stays
unknown. Starts without a completed step answer the same incident.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from flyball.contracts.events import Event, EventKind
from goodput.history.epochs import Epochs, StepReport, epochs_in
from goodput.read.event_files import MalformedLines
from goodput.read.importers.node_clocks import aligned
from goodput.read.importers.records import SAME_MOMENT_S, UNKNOWN_STEP, ImportedRecord, RecordKind
from goodput.wording import counted

MAX_STEPS_PER_EVENT = 1000
# Some lines have the duration of a step. The rest of the time since the previous line was spent otherwise, if it
# exceeds both the resolution of such lines' clocks and this share of the steps.
_CLOCK_S = 2.0
_NOTABLE = 0.05
# The most that a node's clock may be behind if the steps of its file could not correct it. Restarts take longer.
_BEHIND_S = 30.0

_Value: TypeAlias = str | int | float | bool | list[int | float | str] | None


def events_of(
    records: Iterable[ImportedRecord], refusals: MalformedLines, *, saves_are_steps: bool = False
) -> Iterator[Event]:
    """Yield the events of every job in `records`, in any order of records.

    Records with ambiguous times are left out; assumptions are added to `refusals`. With `saves_are_steps` the log has
    no sign of a step other than its save; a step saved twice in a row was then saved by two nodes.
    """
    jobs: dict[str, set[ImportedRecord]] = defaultdict(set)
    for record in records:
        jobs[record.job].add(record)
    assumed = refusals.assumed
    if unclear := refusals.unclear:
        jobs = {
            job: {record for record in of_job if record.at not in unclear.get(record.file, ())}
            for job, of_job in jobs.items()
        }
    for job in sorted(jobs):
        in_order = sorted(aligned(job, jobs.pop(job), assumed))
        numbered = numbered_through(job, in_order, assumed, saves_are_steps=saves_are_steps)
        yield from _History(job, saves_are_steps=saves_are_steps).events(numbered)


class _History:
    """A fold over one job's records in order of time."""

    def __init__(self, job: str, *, saves_are_steps: bool) -> None:
        self._job = job
        self._saves_are_steps = saves_are_steps
        self._out: list[Event] = []
        self._generation = 0
        self._incident = ""  # the open one
        self._stopped_at: float | None = None  # newest sign that this generation's processes ended
        self._ended: ImportedRecord | None = None  # newest sign that the job ended
        self._last_logged: dict[tuple[str, int], tuple[int, int]] = {}  # (file, rank) -> generation and its newest step
        self._recent: dict[int, OrderedDict[int, float]] = defaultdict(OrderedDict)  # rank -> step -> when logged
        self._reset(0.0, None)

    def _reset(self, first_sign: float, started_at: float | None) -> None:
        self._first_sign = first_sign
        self._started_at = started_at
        self._answers = self._incident
        self._starts: dict[str, float] = {}  # node -> its start
        self._ready: dict[RecordKind, tuple[float, int]] = {}  # newest LOADED and READY
        self._restore_steps: set[int] = set()
        self._began: dict[int, tuple[float, int]] = {}  # rank -> its newest step that began
        self._newest: dict[int, tuple[float, int]] = {}  # rank -> its newest complete step
        self._steps: dict[int, list[tuple[int, float]]] = defaultdict(list)  # not emitted yet

    @property
    def _has_steps(self) -> bool:
        return bool(self._newest or self._began)

    def events(self, records: Iterable[ImportedRecord]) -> Iterator[Event]:
        take = {
            RecordKind.SUBMITTED: self._take_submitted,
            RecordKind.STARTED: self._take_start,
            RecordKind.LOADED: self._take_ready,
            RecordKind.READY: self._take_ready,
            RecordKind.STEP: self._take_step,
            RecordKind.BEGAN: self._take_began,
            RecordKind.SAVED: self._take_saved,
            RecordKind.ENTERED: self._take_entered,
            RecordKind.PHASE: self._take_phase,
            RecordKind.STOPPED: self._take_stopped,
            RecordKind.ENDED: self._take_ended,
        }
        for record in records:
            take[record.kind](record)
            yield from self._drain()
        self._close_generation()
        if self._ended is not None:
            self._emit(EventKind.JOB_ENDED, self._ended.at, {"outcome": self._ended.label}, generation=-1)
        yield from self._drain()

    # --- one record ---

    def _take_submitted(self, record: ImportedRecord) -> None:
        self._emit(EventKind.JOB_SUBMITTED, record.at, generation=-1)

    def _take_start(self, record: ImportedRecord) -> None:
        known = self._starts.get(record.label)
        if known is not None and record.at - known <= SAME_MOMENT_S:
            return
        if self._generation == 0 or self._has_steps or known is not None:
            self._next_generation(record.at, started_at=record.at)
        elif self._started_at is None:
            self._started_at = record.at
        self._starts[record.label] = record.at
        self._emit(EventKind.RANK_MARKS, record.at, {"spawned_at": record.at}, rank=record.rank)

    def _take_ready(self, record: ImportedRecord) -> None:
        if self._has_steps:
            known_at, known_step = self._ready.get(record.kind, (record.at, None))
            if known_step == record.step and record.at - known_at <= SAME_MOMENT_S:
                return
        if self._generation == 0 or self._has_steps:
            self._next_generation(record.at)
        self._ready[record.kind] = (record.at, record.step)
        if record.step != UNKNOWN_STEP:
            self._restore_steps.add(record.step)
        if record.kind is RecordKind.LOADED and record.step >= 0:
            self._emit(EventKind.RESTORED, record.at, {"step": record.step}, rank=record.rank)
        self._emit(EventKind.RANK_MARKS, record.at, {"restored_at": record.at}, rank=record.rank)

    def _take_step(self, record: ImportedRecord) -> None:
        known = self._newest.get(record.rank)
        if self._is_known(record, known):
            return
        if self._generation == 0 or (known is not None and record.step <= known[1]):
            # Nothing shows when the loop began; it completed at least one step, if the line has a step's duration.
            began_at = record.at - record.seconds
            self._next_generation(began_at)
            known = None
            if record.seconds > 0:
                self._take_ready(record._replace(at=began_at, kind=RecordKind.READY, step=UNKNOWN_STEP))
        if record.seconds > 0 and known is not None:
            self._emit_other_phase(record, *known)
        elif record.seconds > 0 and not self._newest:
            self._count_back(record)
        self._complete(record.rank, record.step, record.at)
        self._remember(record)

    def _take_began(self, record: ImportedRecord) -> None:
        known = self._began.get(record.rank)
        if self._is_known(record, known):
            return
        if self._generation == 0 or (known is not None and record.step <= known[1]):
            self._next_generation(record.at)
            known = None
        if known is None:
            self._restore_steps.add(record.step - 1)
            self._emit(EventKind.RANK_MARKS, record.at, {"restored_at": record.at}, rank=record.rank)
        else:
            self._complete(record.rank, record.step - 1, record.at)
        self._began[record.rank] = (record.at, record.step)
        self._remember(record)

    def _take_saved(self, record: ImportedRecord) -> None:
        if self._saves_are_steps:
            self._take_step(record)
        data: dict[str, _Value] = {"step": record.step, "tier": record.label}
        self._emit(EventKind.CHECKPOINT_SAVED, record.at, data, rank=record.rank)

    def _take_entered(self, record: ImportedRecord) -> None:
        if self._generation == 0:
            self._next_generation(record.at)
        self._emit(EventKind.PHASE, record.at, {"phase": record.label}, rank=record.rank)

    def _take_phase(self, record: ImportedRecord) -> None:
        if self._generation == 0 or (self._has_steps and record.label == "restore"):
            self._next_generation(record.at - record.seconds)
        self._emit_phase(record.rank, record.label, record.at - record.seconds, record.at)

    def _take_stopped(self, record: ImportedRecord) -> None:
        if self._ended is None:
            self._stopped_at = record.at
        else:  # it was over once its processes were gone
            self._ended = self._ended._replace(at=record.at)

    def _take_ended(self, record: ImportedRecord) -> None:
        self._ended = record

    # --- what follows from several ---

    def _is_known(self, record: ImportedRecord, newest: tuple[float, int] | None) -> bool:
        """Whether a step was logged before and is not being recomputed.

        That is so if it was logged a moment ago, or if its file goes on while another file is ahead. A file that goes
        back within a generation recomputes steps.
        """
        if newest is None:
            return False
        source = (record.file, record.rank)
        generation, before = self._last_logged.get(source, (0, record.step))
        goes_on = before < record.step and record.at - newest[0] <= _BEHIND_S
        of_an_earlier = generation < self._generation
        if record.step > newest[1]:
            if not (goes_on and of_an_earlier and before > newest[1]):
                return False
            self._last_logged[source] = (generation, record.step)  # completed before the others went back
            return True
        logged_at = self._recent[record.rank].get(record.step, -math.inf)
        repeated = record.at - logged_at <= SAME_MOMENT_S and (before == record.step or of_an_earlier)
        saved_twice = self._saves_are_steps and record.step == newest[1]
        if not (goes_on or saved_twice or repeated):
            return False
        self._last_logged[source] = (self._generation, record.step)
        return True

    def _remember(self, record: ImportedRecord) -> None:
        """Remember what later decides whether a step is known."""
        self._last_logged[record.file, record.rank] = (self._generation, record.step)
        recent = self._recent[record.rank]
        while recent and record.at - next(iter(recent.values())) > SAME_MOMENT_S:
            recent.popitem(last=False)
        recent[record.step] = record.at
        recent.move_to_end(record.step)

    def _next_generation(self, at: float, *, started_at: float | None = None) -> None:
        interrupted = self._has_steps and self._ended is None
        opened_at = at if self._stopped_at is None else self._stopped_at
        self._close_generation()
        if interrupted:
            self._incident = f"restart-{self._generation}"
            data: dict[str, _Value] = {"cause": "restart", "inferred": True}
            self._emit(EventKind.INCIDENT_OPENED, opened_at, data, generation=-1, incident=self._incident)
        self._ended = None  # it went on after all
        self._generation += 1
        self._reset(at, started_at)

    def _close_generation(self) -> None:
        """Emit a generation's events; its start is only known at its end."""
        if self._generation == 0:
            return
        self._emit_steps()
        started_at = self._started_at
        if started_at is None:
            started_at = min((at for at, _ in self._ready.values()), default=None)
        if started_at is None:
            self._emit(EventKind.GENERATION_GRANTED, self._first_sign, incident=self._answers)
        else:
            step = min(self._restore_steps, default=UNKNOWN_STEP)
            data: dict[str, _Value] = {} if step == UNKNOWN_STEP else {"restore_step": step if step >= 0 else None}
            self._emit(EventKind.GENERATION_STARTED, started_at, data, incident=self._answers)
        if self._stopped_at is not None:
            self._emit(EventKind.WORKERS_STOPPED, self._stopped_at)
            self._stopped_at = None

    def _complete(self, rank: int, step: int, at: float) -> None:
        if self._incident and not self._newest:
            data: dict[str, _Value] = {"state": "resolved"}
            self._emit(EventKind.INCIDENT_CLOSED, at, data, generation=-1, incident=self._incident)
            self._incident = ""
        self._stopped_at = None  # one node's end was not the end of all
        self._newest[rank] = (at, step)
        self._steps[rank].append((step, at))
        if len(self._steps[rank]) >= MAX_STEPS_PER_EVENT:
            self._emit_steps()

    def _count_back(self, record: ImportedRecord) -> None:
        """The first line covers all steps since the loop began. Derive their number from a step's duration, if the
        clock is fine enough."""
        ready_at, step = self._ready.get(RecordKind.READY, (record.at, UNKNOWN_STEP))
        if step == UNKNOWN_STEP and record.at > ready_at and record.seconds >= _CLOCK_S:
            count = max(1, round((record.at - ready_at) / record.seconds))
            self._restore_steps.add(max(-1, record.step - count))

    def _emit_other_phase(self, record: ImportedRecord, known_at: float, known_step: int) -> None:
        """If a line arrives later than its steps' duration after the previous line, something unknown was done in
        between."""
        steps_s = (record.step - known_step) * record.seconds
        beside_s = record.at - known_at - steps_s
        if beside_s > max(_CLOCK_S, _NOTABLE * steps_s):
            self._emit_phase(record.rank, "other", known_at, known_at + beside_s)

    # --- emitting events ---

    def _emit_steps(self) -> None:
        """Emit all pending steps; consecutive ones share an event."""
        for rank, steps in sorted(self._steps.items()):
            first = 0
            for end in range(1, len(steps) + 1):
                if end == len(steps) or steps[end][0] != steps[end - 1][0] + 1:
                    data: dict[str, _Value] = {
                        "first_step": steps[first][0],
                        "completed_at": [at for _, at in steps[first:end]],
                    }
                    self._emit(EventKind.STEPS, steps[end - 1][1], data, rank=rank)
                    first = end
        self._steps.clear()

    def _emit_phase(self, rank: int, phase: str, start: float, end: float) -> None:
        self._emit(EventKind.PHASE, start, {"phase": phase}, rank=rank)
        self._emit(EventKind.PHASE, end, {"phase": "step"}, rank=rank)

    def _emit(
        self,
        kind: EventKind,
        at: float,
        data: Mapping[str, _Value] | None = None,
        *,
        generation: int | None = None,
        rank: int = -1,
        incident: str = "",
    ) -> None:
        number = self._generation if generation is None else generation
        self._out.append(Event(at, kind, self._job, number, rank, "", incident, data or {}))

    def _drain(self) -> Iterator[Event]:
        yield from self._out
        self._out.clear()


# --- step numbers of each epoch --------------------------------------------------------------------------------------

# After these records, numbers that start over belong to a restart. A loaded checkpoint is such a sign, too, and has its
# step.
_SIGNS = frozenset(
    {
        RecordKind.SUBMITTED,
        RecordKind.STARTED,
        RecordKind.LOADED,
        RecordKind.READY,
        RecordKind.STOPPED,
        RecordKind.ENDED,
    }
)
_COMPLETE_BEFORE = frozenset({RecordKind.LOADED, RecordKind.READY, RecordKind.SAVED})


def numbered_through(
    job: str, records: Sequence[ImportedRecord], assumed: list[str], *, saves_are_steps: bool
) -> Sequence[ImportedRecord]:
    """Number a job's records, in order of time, through its epochs.

    The file and rank with the most steps says where epochs began. If there are any, a note is added to `assumed`.
    """
    steps = {RecordKind.STEP, RecordKind.BEGAN, *([RecordKind.SAVED] if saves_are_steps else [])}
    counts = Counter((record.file, record.rank) for record in records if record.kind in steps)
    leader = max(sorted(counts), key=lambda source: counts[source], default=None)
    logged = [r for r in records if r.kind in steps and (r.file, r.rank) == leader]
    if all(one.step < two.step for one, two in pairwise(logged)):
        return records
    signs = [record.at for record in records if _is_sign(record)]
    epochs = epochs_in((StepReport(record.at, record.step) for record in logged), restarts=signs)
    if epochs is None:
        return records
    again = (
        " A restart at the first step of an epoch is taken to recompute the newest epoch." if epochs.restarts else ""
    )
    assumed.append(
        f"Job {job}: step numbers start over {counted(epochs.count - 1, 'time')} without a sign of a failure: this is"
        f" taken for epochs, and the steps are numbered through.{again}"
    )
    return sorted(_numbered(record, epochs, before=record.kind in _COMPLETE_BEFORE - steps) for record in records)


def _is_sign(record: ImportedRecord) -> bool:
    return record.kind in _SIGNS or (
        record.kind in (RecordKind.PHASE, RecordKind.ENTERED) and record.label in ("restore", "init")
    )


def _numbered(record: ImportedRecord, epochs: Epochs, *, before: bool) -> ImportedRecord:
    if record.step < 0:
        return record
    step = StepReport(record.at, record.step)
    number = epochs.number_before(step) if before else epochs.number(step)
    return record._replace(step=number)
