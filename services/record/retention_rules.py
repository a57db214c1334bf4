"""How long records are kept, and how step events are merged. Pure.

A running job writes one step event per second and sensor: 29 MB a day on SQLite. The events of ten minutes are merged
into one with the same steps and times, so goodput stays the same: 2.2 MB remain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from flyball.contracts.events import Event, EventKind

DAY_S = 86_400.0
SPAN_S = 600.0  # of a merged event
LEAST_LUMP_S = 0.1  # shorter waits are kept per SPAN_S only
LUMP_FACTOR = 3.0
AVERAGED_EVENTS = 20
LATE_S = 5.0  # a signal that took longer had to wait, which goodput accounts for
_TOTALS = ("save_blocked_s", "data_wait_s")  # since the generation began
_GREATEST = ("slowest_step", "ranks", *_TOTALS)


class RetentionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the supervisor keeps what it no longer needs to decide."""

    steps_in_full_s: float = 3600.0  # until step events are merged
    detail_days: float = 7.0  # signals, commands and the changes of actions, once they are over
    history_days: float = 365.0  # jobs that ended, with their events, incidents and decisions
    dead_host_days: float = 7.0  # hosts that left or fell silent, and have no rank
    audit_days: float = 365.0  # who did what
    max_signals: int = 1_000_000  # only the newest are kept, whatever the age of the others

    def __post_init__(self) -> None:
        """Raises ValueError unless all values are above 0."""
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")


class Merged(msgspec.Struct, frozen=True):
    """`event` replaces event `number`, and contains those in `gone`."""

    number: int
    event: Event
    gone: tuple[int, ...]


class _Run:
    """Summaries of one sensor that follow each other without a gap."""

    def __init__(self, number: int, event: Event, first_step: int) -> None:
        self.numbers = [number]
        self.newest = event
        self.first_step = first_step
        self.completed_at = list(_times(event))
        self.data = dict(event.data)

    @property
    def next_step(self) -> int:
        return self.first_step + len(self.completed_at)

    def add(self, number: int, event: Event) -> None:
        self.numbers.append(number)
        self.completed_at += _times(event)
        self.newest = event
        greatest = {name: max(_number(self.data, name), _number(event.data, name)) for name in _GREATEST}
        self.data |= {**event.data, **greatest}

    def merged(self) -> Merged:
        data = {**self.data, "first_step": self.first_step, "completed_at": self.completed_at}
        event = msgspec.structs.replace(self.newest, data=data)
        return Merged(self.numbers[-1], event, tuple(self.numbers[:-1]))


class _Lumps:
    """Finds the events in which a total grew far more than on average: a save that blocked, or late data. Goodput must
    know the step."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._average_s: dict[str, float] = {}

    def is_one(self, event: Event) -> bool:
        found = False
        for name in _TOTALS:
            total_s = _number(event.data, name)
            growth_s = max(0.0, total_s - self._before.get(name, total_s))
            average_s = self._average_s.get(name, 0.0)
            found |= growth_s >= LEAST_LUMP_S and growth_s > LUMP_FACTOR * average_s
            self._before[name] = total_s
            self._average_s[name] = average_s + (growth_s - average_s) / AVERAGED_EVENTS
        return found


def merge_steps(events: Iterable[tuple[int, Event]]) -> list[Merged]:
    """Merge the step summaries among these (number, event) pairs of one job, in the order of their numbers.

    Only summaries that follow each other without a gap are merged: a step that was reported twice, by slower ranks or
    in a second epoch, stays twice. A summary in which a save or data held up training stays as it is.
    """
    open_runs: dict[tuple[int, str, int], dict[int, _Run]] = defaultdict(dict)  # next step -> run
    lumps: dict[tuple[int, str], _Lumps] = defaultdict(_Lumps)
    runs: list[_Run] = []
    for number, event in events:
        first_step = event.data.get("first_step")
        if event.kind is not EventKind.STEPS or "slowest_step" not in event.data or not isinstance(first_step, int):
            continue
        sensor = str(event.data.get("sensor", ""))
        of_sensor = open_runs[event.generation, sensor, span_of(event.at)]
        if lumps[event.generation, sensor].is_one(event):
            of_sensor.clear()
            continue
        run = of_sensor.pop(first_step, None)
        if run is None:
            run = _Run(number, event, first_step)
            runs.append(run)
        else:
            run.add(number, event)
        of_sensor.setdefault(run.next_step, run)
    return [run.merged() for run in runs if len(run.numbers) > 1]


def span_of(at: float) -> int:
    """The number of the ten minutes around this moment."""
    return int(at // SPAN_S)


def is_prompt_signal(event: Event) -> bool:
    """Whether this is about a signal that arrived at once: goodput needs only those that had to wait."""
    observed_at = event.data.get("observed_at")
    return event.kind is EventKind.SIGNAL and isinstance(observed_at, int | float) and event.at - observed_at <= LATE_S


def _times(event: Event) -> Sequence[int | float | str]:
    times = event.data.get("completed_at")
    return times if isinstance(times, list) else []


def _number(data: object, name: str) -> int | float:
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, int | float) else 0
