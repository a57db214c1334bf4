"""From records of a log to the events of every job in it. Pure.

A generation begins with the start of a process (of a node that started before, or after steps), with the loading of a
checkpoint after steps, or where the number of a rank's step does not grow within a file. Each that follows steps
answers an incident, cause `restart`, which is `inferred`: nothing tells when it began, so the time before the restart
stays unknown. Starts that complete no step answer the same incident.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from flyball.contracts.events import Event, EventKind
from goodput.history.epochs import Epochs, Telling, epochs_in
from goodput.read.event_files import MalformedLines
from goodput.read.importers.node_clocks import aligned
from goodput.read.importers.records import SAME_MOMENT_S, UNKNOWN_STEP, ImportedRecord, RecordKind
from goodput.wording import counted

MAX_STEPS_PER_EVENT = 1000
# Some lines say what a step took. What is left of the time since the line before was spent otherwise, if it is more
# than the clock of such lines tells apart, and than this part of the steps.
_CLOCK_S = 2.0
_NOTABLE = 0.05
# So far the clock of a node may be behind where the steps of its file could not set it. Restarts take longer.
_BEHIND_S = 30.0

_Value: TypeAlias = str | int | float | bool | list[int | float | str] | None


def events_of(
    records: Iterable[ImportedRecord], refusals: MalformedLines, *, saves_are_steps: bool = False
) -> Iterator[Event]:
    """The events of every job in `records`, which come in any order, without those of times that turn out to be
    unclear when all were read; what was assumed of them is added to `refusals`.
    With `saves_are_steps` the log has no other sign of a step than that its state was saved; a step that is saved twice
    in a row was then saved by two nodes."""
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
    """A fold over one job's records in the order of time."""

    def __init__(self, job: str, *, saves_are_steps: bool) -> None:
        self._job = job
        self._saves_are_steps = saves_are_steps
        self._out: list[Event] = []
        self._generation = 0
        self._incident = ""  # that is open
        self._stopped_at: float | None = None  # newest sign that the processes of this generation ended
        self._ended: ImportedRecord | None = None  # newest sign that the job did
        self._last_told: dict[tuple[str, int], tuple[int, int]] = {}  # file and rank -> generation, its newest step
        self._just_told: dict[int, OrderedDict[int, float]] = defaultdict(OrderedDict)  # rank -> steps of a moment
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
        self._steps: dict[int, list[tuple[int, float]]] = defaultdict(list)  # not told yet

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
            yield from self._told()
        self._close_generation()
        if self._ended is not None:
            self._tell(EventKind.JOB_ENDED, self._ended.at, {"outcome": self._ended.label}, generation=-1)
        yield from self._told()

    # --- one record ---

    def _take_submitted(self, record: ImportedRecord) -> None:
        self._tell(EventKind.JOB_SUBMITTED, record.at, generation=-1)

    def _take_start(self, record: ImportedRecord) -> None:
        known = self._starts.get(record.label)
        if known is not None and record.at - known <= SAME_MOMENT_S:
            return
        if self._generation == 0 or self._has_steps or known is not None:
            self._next_generation(record.at, started_at=record.at)
        elif self._started_at is None:
            self._started_at = record.at
        self._starts[record.label] = record.at
        self._tell(EventKind.RANK_MARKS, record.at, {"spawned_at": record.at}, rank=record.rank)

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
            self._tell(EventKind.RESTORED, record.at, {"step": record.step}, rank=record.rank)
        self._tell(EventKind.RANK_MARKS, record.at, {"restored_at": record.at}, rank=record.rank)

    def _take_step(self, record: ImportedRecord) -> None:
        known = self._newest.get(record.rank)
        if self._is_known(record, known):
            return
        if self._generation == 0 or (known is not None and record.step <= known[1]):
            # Nothing says when the loop began; one step at least was done in it, if the line says what that took.
            began_at = record.at - record.seconds
            self._next_generation(began_at)
            known = None
            if record.seconds > 0:
                self._take_ready(record._replace(at=began_at, kind=RecordKind.READY, step=UNKNOWN_STEP))
        if record.seconds > 0 and known is not None:
            self._tell_time_beside_steps(record, *known)
        elif record.seconds > 0 and not self._newest:
            self._count_back(record)
        self._complete(record.rank, record.step, record.at)
        self._keep_told(record)

    def _take_began(self, record: ImportedRecord) -> None:
        known = self._began.get(record.rank)
        if self._is_known(record, known):
            return
        if self._generation == 0 or (known is not None and record.step <= known[1]):
            self._next_generation(record.at)
            known = None
        if known is None:
            self._restore_steps.add(record.step - 1)
            self._tell(EventKind.RANK_MARKS, record.at, {"restored_at": record.at}, rank=record.rank)
        else:
            self._complete(record.rank, record.step - 1, record.at)
        self._began[record.rank] = (record.at, record.step)
        self._keep_told(record)

    def _take_saved(self, record: ImportedRecord) -> None:
        if self._saves_are_steps:
            self._take_step(record)
        data: dict[str, _Value] = {"step": record.step, "tier": record.label}
        self._tell(EventKind.CHECKPOINT_SAVED, record.at, data, rank=record.rank)

    def _take_entered(self, record: ImportedRecord) -> None:
        if self._generation == 0:
            self._next_generation(record.at)
        self._tell(EventKind.PHASE, record.at, {"phase": record.label}, rank=record.rank)

    def _take_phase(self, record: ImportedRecord) -> None:
        if self._generation == 0 or (self._has_steps and record.label == "restore"):
            self._next_generation(record.at - record.seconds)
        self._tell_phase(record.rank, record.label, record.at - record.seconds, record.at)

    def _take_stopped(self, record: ImportedRecord) -> None:
        if self._ended is None:
            self._stopped_at = record.at
        else:  # it was over once its processes were gone
            self._ended = self._ended._replace(at=record.at)

    def _take_ended(self, record: ImportedRecord) -> None:
        self._ended = record

    # --- what follows from several ---

    def _is_known(self, record: ImportedRecord, newest: tuple[float, int] | None) -> bool:
        """Whether a step was told of before and is not done again: it was told of a moment ago, or its file goes on
        while another is ahead. A file that goes back within a generation tells of steps that are done again."""
        if newest is None:
            return False
        teller = (record.file, record.rank)
        generation, before = self._last_told.get(teller, (0, record.step))
        goes_on = before < record.step and record.at - newest[0] <= _BEHIND_S
        of_an_earlier = generation < self._generation
        if record.step > newest[1]:
            if not (goes_on and of_an_earlier and before > newest[1]):
                return False
            self._last_told[teller] = (generation, record.step)  # it was done before the others went back
            return True
        told_at = self._just_told[record.rank].get(record.step, -math.inf)
        told_again = record.at - told_at <= SAME_MOMENT_S and (before == record.step or of_an_earlier)
        saved_twice = self._saves_are_steps and record.step == newest[1]
        if not (goes_on or saved_twice or told_again):
            return False
        self._last_told[teller] = (self._generation, record.step)
        return True

    def _keep_told(self, record: ImportedRecord) -> None:
        """What tells later whether a step is known."""
        self._last_told[record.file, record.rank] = (self._generation, record.step)
        told = self._just_told[record.rank]
        while told and record.at - next(iter(told.values())) > SAME_MOMENT_S:
            told.popitem(last=False)
        told[record.step] = record.at
        told.move_to_end(record.step)

    def _next_generation(self, at: float, *, started_at: float | None = None) -> None:
        interrupted = self._has_steps and self._ended is None
        opened_at = at if self._stopped_at is None else self._stopped_at
        self._close_generation()
        if interrupted:
            self._incident = f"restart-{self._generation}"
            data: dict[str, _Value] = {"cause": "restart", "inferred": True}
            self._tell(EventKind.INCIDENT_OPENED, opened_at, data, generation=-1, incident=self._incident)
        self._ended = None  # it goes on after all
        self._generation += 1
        self._reset(at, started_at)

    def _close_generation(self) -> None:
        """Tell what is known of a generation only at its end."""
        if self._generation == 0:
            return
        self._tell_steps()
        started_at = self._started_at
        if started_at is None:
            started_at = min((at for at, _ in self._ready.values()), default=None)
        if started_at is None:
            self._tell(EventKind.GENERATION_GRANTED, self._first_sign, incident=self._answers)
        else:
            step = min(self._restore_steps, default=UNKNOWN_STEP)
            data: dict[str, _Value] = {} if step == UNKNOWN_STEP else {"restore_step": step if step >= 0 else None}
            self._tell(EventKind.GENERATION_STARTED, started_at, data, incident=self._answers)
        if self._stopped_at is not None:
            self._tell(EventKind.WORKERS_STOPPED, self._stopped_at)
            self._stopped_at = None

    def _complete(self, rank: int, step: int, at: float) -> None:
        if self._incident and not self._newest:
            data: dict[str, _Value] = {"state": "resolved"}
            self._tell(EventKind.INCIDENT_CLOSED, at, data, generation=-1, incident=self._incident)
            self._incident = ""
        self._stopped_at = None  # one node's end was not that of all
        self._newest[rank] = (at, step)
        self._steps[rank].append((step, at))
        if len(self._steps[rank]) >= MAX_STEPS_PER_EVENT:
            self._tell_steps()

    def _count_back(self, record: ImportedRecord) -> None:
        """The first line sums up the steps since the loop began. Their number follows from what each took, if the clock
        is fine enough for that."""
        ready_at, step = self._ready.get(RecordKind.READY, (record.at, UNKNOWN_STEP))
        if step == UNKNOWN_STEP and record.at > ready_at and record.seconds >= _CLOCK_S:
            count = max(1, round((record.at - ready_at) / record.seconds))
            self._restore_steps.add(max(-1, record.step - count))

    def _tell_time_beside_steps(self, record: ImportedRecord, known_at: float, known_step: int) -> None:
        """A line that says what its steps took, and comes later than that after the line before: something else was
        done meanwhile, and nothing says what."""
        steps_s = (record.step - known_step) * record.seconds
        beside_s = record.at - known_at - steps_s
        if beside_s > max(_CLOCK_S, _NOTABLE * steps_s):
            self._tell_phase(record.rank, "other", known_at, known_at + beside_s)

    # --- telling ---

    def _tell_steps(self) -> None:
        """The steps that are not told yet, those that follow each other in one event."""
        for rank, steps in sorted(self._steps.items()):
            first = 0
            for end in range(1, len(steps) + 1):
                if end == len(steps) or steps[end][0] != steps[end - 1][0] + 1:
                    data: dict[str, _Value] = {
                        "first_step": steps[first][0],
                        "completed_at": [at for _, at in steps[first:end]],
                    }
                    self._tell(EventKind.STEPS, steps[end - 1][1], data, rank=rank)
                    first = end
        self._steps.clear()

    def _tell_phase(self, rank: int, phase: str, start: float, end: float) -> None:
        self._tell(EventKind.PHASE, start, {"phase": phase}, rank=rank)
        self._tell(EventKind.PHASE, end, {"phase": "step"}, rank=rank)

    def _tell(
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

    def _told(self) -> Iterator[Event]:
        yield from self._out
        self._out.clear()


# --- step numbers of each epoch --------------------------------------------------------------------------------------

# After these a number that begins anew is a restart's. A checkpoint that is loaded is one as well, and tells its step.
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
    """The records of a job, in the order of time. The file and rank that tells of most steps says where epochs began;
    that there are any is added to `assumed`."""
    steps = {RecordKind.STEP, RecordKind.BEGAN, *([RecordKind.SAVED] if saves_are_steps else [])}
    tellers = Counter((record.file, record.rank) for record in records if record.kind in steps)
    leader = max(sorted(tellers), key=lambda teller: tellers[teller], default=None)
    told = [r for r in records if r.kind in steps and (r.file, r.rank) == leader]
    if all(one.step < two.step for one, two in pairwise(told)):
        return records
    signs = [record.at for record in records if _is_sign(record)]
    epochs = epochs_in((Telling(record.at, record.step) for record in told), restarts=signs)
    if epochs is None:
        return records
    again = " A restart at the first of them is taken to begin the newest epoch again." if epochs.restarts else ""
    assumed.append(
        f"Job {job}: step numbers begin anew {counted(epochs.count - 1, 'time')} without a sign of a failure: they were"
        f" taken for those of epochs, and numbered through.{again}"
    )
    return sorted(_numbered(record, epochs, before=record.kind in _COMPLETE_BEFORE - steps) for record in records)


def _is_sign(record: ImportedRecord) -> bool:
    return record.kind in _SIGNS or (
        record.kind in (RecordKind.PHASE, RecordKind.ENTERED) and record.label in ("restore", "init")
    )


def _numbered(record: ImportedRecord, epochs: Epochs, *, before: bool) -> ImportedRecord:
    if record.step < 0:
        return record
    told = Telling(record.at, record.step)
    number = epochs.number_before(told) if before else epochs.number(told)
    return record._replace(step=number)
