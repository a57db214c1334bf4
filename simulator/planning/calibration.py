"""Takes the times of a scenario from a measured run: a demo's result, or a goodput report. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from flyball.contracts import wire
from flyball.contracts.errors import UsageError
from goodput.calculator import GoodputReport
from goodput.wording import seconds

_AGAIN = "run `flyball demo -o json` again"
_WORKER_ENDS = frozenset({"worker_killed", "worker_exception", "worker_exit"})  # causes of incidents
# The fields of a scenario, and the parts of a repair that they sum. Medians are taken: a repair that starts the ranks
# twice takes longer, and the simulation has such repairs of its own.
_PARTS = {"times.stop_s": ("stop",), "times.start_s": ("restart", "warm_up"), "times.restore_s": ("restore",)}


class TakenTime(msgspec.Struct, frozen=True):
    """A field of the scenario that a measurement replaces."""

    field: str
    seconds: float
    source: str  # what was measured, in words

    @property
    def setting(self) -> str:
        return f"{self.field}={round(self.seconds, 4):g}"


class Calibration(msgspec.Struct, frozen=True):
    """The times of a measured run. `left` says what was not measured, or not taken, and why."""

    source: str
    taken: tuple[TakenTime, ...]
    left: tuple[str, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(time.setting for time in self.taken)


class _DemoFault(msgspec.Struct):
    fault: str
    decided_s: float | None = None  # when the controller had the report; below 0: never


class _DemoRepair(msgspec.Struct):
    median_s: float | None = None
    count: int = 0


class _DemoTimes(msgspec.Struct):
    """What is read of `flyball demo -o json`."""

    repair: dict[str, _DemoRepair]
    faults: list[_DemoFault] = []


def from_demo(demo: Mapping[str, Any], source: str) -> Calibration:
    """The times of `flyball demo -o json`. Raises UsageError if it has none."""
    repair = demo.get("repair")
    if not isinstance(repair, Mapping):
        raise UsageError(f"{source} has no parts of its repairs: an older release wrote it.", hint=_AGAIN)
    try:
        found = wire.convert(demo, _DemoTimes)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source} is not what the demo writes: {error}.", hint=_AGAIN) from error
    kills = []
    for number, row in enumerate(found.faults):
        if row.fault == "kill":
            if row.decided_s is None:
                raise UsageError(f"{source}: faults[{number}] is a kill without decided_s.", hint=_AGAIN)
            kills += [row.decided_s] if row.decided_s >= 0.0 else []
    medians = {name: (part.median_s, part.count) for name, part in found.repair.items()}
    return _calibration(source, medians, kills, None, "the demo's small model says nothing about saves of a large one")


def from_report(report: GoodputReport, source: str) -> Calibration:
    """The times of a run's goodput report. Raises UsageError if no repair was measured."""
    ends = [
        incident.detected_s
        for incident in report.incidents
        if incident.cause in _WORKER_ENDS and incident.detected_s is not None and not incident.began_is_estimate
    ]
    medians = {name: (part.median_s, part.count) for name, part in report.repair.items()}
    blocked_s = report.recommendation.save_blocked_s if report.recommendation is not None else None
    return _calibration(source, medians, ends, blocked_s, "the log does not show what a save costs")


def _calibration(
    source: str,
    medians: Mapping[str, tuple[float | None, int]],
    ends: Sequence[float],
    save_s: float | None,
    no_save: str,
) -> Calibration:
    taken = tuple(_taken(medians, ends, save_s))
    if not taken:
        raise UsageError(
            f"{source} has no repair that ended: there is nothing to take.", hint="name a run that was interrupted"
        )
    fields = {time.field for time in taken}
    left = [f"{field}: not measured" for field in _PARTS if field not in fields]
    if "times.notice_s" not in fields:
        left.append("times.notice_s: no end of a worker whose moment is known")
    if save_s is None:
        left.append(f"checkpoint.save_s: {no_save}")
    left.append("times.persistent_restore_s: restores are not told apart by tier")
    left.append("hangs and lost hosts: the detector itself finds them in a simulation")
    return Calibration(source, taken, tuple(left))


def _taken(
    medians: Mapping[str, tuple[float | None, int]], ends: Sequence[float], save_s: float | None
) -> Iterator[TakenTime]:
    if ends:
        yield TakenTime("times.notice_s", fmean(ends), f"mean detection of {len(ends)} ended workers")
    for field, names in _PARTS.items():
        known = {name: found for name in names if (found := medians.get(name, (None, 0)))[0] is not None}
        if known:
            what, repairs = " and ".join(known).replace("_", " "), max(count for _, count in known.values())
            total = sum(median or 0.0 for median, _ in known.values())
            yield TakenTime(field, total, f"median {what} of {repairs} repairs")
    if save_s is not None:
        yield TakenTime("checkpoint.save_s", save_s, "mean time for which a save blocked training")


def in_words(found: Calibration) -> list[str]:
    """One line per time that was taken, and per time that was not."""
    taken = [f"{time.field} = {seconds(time.seconds)}, {time.source}" for time in found.taken]
    return [f"times from {found.source}:", *(f"  {line}" for line in taken), *(f"  not {line}" for line in found.left)]
