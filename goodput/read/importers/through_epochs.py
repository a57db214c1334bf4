"""Records whose step numbers begin anew with each epoch, numbered through the run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from goodput.history.epochs import Epochs, Telling, epochs_in
from goodput.read.importers.records import Kind, Record
from goodput.wording import counted

# After these a number that begins anew is a restart's. A checkpoint that is loaded is one as well, and tells its step.
_SIGNS = frozenset({Kind.SUBMITTED, Kind.STARTED, Kind.LOADED, Kind.READY, Kind.STOPPED, Kind.ENDED})
_COMPLETE_BEFORE = frozenset({Kind.LOADED, Kind.READY, Kind.SAVED})


def numbered_through(
    job: str, records: Sequence[Record], assumed: list[str], *, saves_are_steps: bool
) -> Sequence[Record]:
    """The records of a job, in the order of time. The file and rank that tells of most steps says where epochs began;
    that there are any is added to `assumed`."""
    steps = {Kind.STEP, Kind.BEGAN, *([Kind.SAVED] if saves_are_steps else [])}
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


def _is_sign(record: Record) -> bool:
    return record.kind in _SIGNS or (record.kind in (Kind.PHASE, Kind.ENTERED) and record.label in ("restore", "init"))


def _numbered(record: Record, epochs: Epochs, *, before: bool) -> Record:
    if record.step < 0:
        return record
    told = Telling(record.at, record.step)
    number = epochs.number_before(told) if before else epochs.number(told)
    return record._replace(step=number)
