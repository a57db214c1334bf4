"""The points of a sweep: every combination of the values that fields of a scenario take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from flyball.contracts.errors import UsageError
from simulator.fleet import scenario
from simulator.fleet.scenario import FleetScenario

MOST_POINTS = 10_000


class Axis(msgspec.Struct, frozen=True):
    """A field, and the values that it takes, as the user wrote them."""

    field: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """Parse `checkpoint.every_s=30,60`. Raises UsageError."""
    field, separator, values = text.partition("=")
    found = tuple(value.strip() for value in _split(values))
    if not separator or not field.strip() or not all(found):
        raise UsageError(
            f"--vary {text} has no values.", hint="write KEY=VALUE,VALUE,..., e.g. checkpoint.every_s=30,60,120"
        )
    twice = next((value for value in found if found.count(value) > 1), None)
    if twice is not None:
        raise UsageError(f"--vary {field} has {twice} twice.", hint="name each value once")
    return Axis(field.strip(), found)


def _split(values: str) -> Iterator[str]:
    """Split at commas, but not inside brackets."""
    depth, start = 0, 0
    for at, letter in enumerate(values):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            yield values[start:at]
            start = at + 1
    yield values[start:]


class Point(msgspec.Struct, frozen=True):
    """One combination of values, in the order of the axes."""

    values: tuple[str, ...]
    settings: tuple[str, ...]


def points_of(axes: Sequence[Axis]) -> list[Point]:
    """All combinations; the last axis varies fastest. Raises UsageError."""
    fields = [axis.field for axis in axes]
    if len(set(fields)) < len(fields):
        raise UsageError("A field is varied twice.", hint="give all of its values in one --vary")
    combinations = list(itertools.islice(itertools.product(*(axis.values for axis in axes)), MOST_POINTS + 1))
    if len(combinations) > MOST_POINTS:
        raise UsageError(
            f"These are more than {MOST_POINTS:,} combinations.", hint="vary fewer fields, or fewer values"
        )
    return [
        Point(values, tuple(f"{field}={value}" for field, value in zip(fields, values, strict=True)))
        for values in combinations
    ]


def scenarios_of(name: str, settings: Sequence[str], points: Sequence[Point]) -> list[FleetScenario]:
    """The scenario of each point. Raises ConfigurationError, which names the field and value that do not fit."""
    text = scenario.read(name)
    return [scenario.parse(text, name, (*settings, *point.settings)) for point in points]
