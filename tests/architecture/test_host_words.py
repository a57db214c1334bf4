"""Every field that a host's daemon may send is in docs/reference/host-words.md, with a test, and has bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import inspect

from flyball.contracts.decisions import CommandUpdate
from flyball.contracts.reports.conditions import ConditionRequest
from flyball.contracts.reports.rank_logs import LogPiece
from flyball.contracts.reports.signals import Report
from flyball.contracts.reports.standings import HostStanding

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "host-words.md"
BODIES = (Report, HostStanding, CommandUpdate, LogPiece, ConditionRequest)
# Numbers of any size are harmless here: they are compared, shown or kept in a document.
ANY_NUMBER = {
    "Report.version": "anything but the one version is refused",
    "RankLoss.value": "a loss may be anything",
    "HostCondition.evidence": "shown",
    "ConditionRequest.evidence": "shown",
    "JobSpec.policy": "of a job that is sealed or that an operator adopts; wrong values are ignored",
}
REFUSED = {"RankStalled", "FalseAlarm", "HostSilent", "HostSuspect", "HostReturned", "LossDiverged", "LossRecovered"}


def structs(kind: inspect.Type, found: dict[str, inspect.StructType]) -> None:
    """Collect all structs of a body, by name."""
    if isinstance(kind, inspect.StructType) and kind.cls.__name__ not in found:
        found[kind.cls.__name__] = kind
        for field in kind.fields:
            structs(field.type, found)
    for part in parts(kind):
        structs(part, found)


def parts(kind: inspect.Type) -> Iterator[inspect.Type]:
    for name in ("types", "item_types"):
        yield from getattr(kind, name, ())
    for name in ("item_type", "key_type", "value_type"):
        if (part := getattr(kind, name, None)) is not None:
            yield part


def sent() -> dict[str, inspect.StructType]:
    found: dict[str, inspect.StructType] = {}
    for body in BODIES:
        structs(inspect.type_info(body), found)
    return found


def rows() -> list[tuple[list[str], str]]:
    """The fields and the test of each row of the page."""
    lines = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([\w.*]+)`", line[0]), line[-1].strip("`")) for line in lines]


def test_every_field_of_every_body_is_in_the_table() -> None:
    known = sent()
    fields = {f"{name}.{field.encode_name}" for name, kind in known.items() for field in kind.fields}
    named: list[str] = []
    for patterns, _ in rows():
        for pattern in patterns:
            name, _, field = pattern.partition(".")
            assert name in known, f"{pattern}: no daemon sends a {name}"
            named += [one for one in fields if one.startswith(f"{name}.")] if field == "*" else [pattern]
    assert set(named) == fields, f"not in {PAGE.name}: {sorted(fields - set(named))}"
    assert len(named) == len(set(named)), "twice in the table"


@pytest.mark.parametrize("test", [test for _, test in rows()])
def test_every_row_names_a_test_that_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def numbers(kind: inspect.Type) -> Iterator[inspect.IntType | inspect.FloatType]:
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        yield kind
    if not isinstance(kind, inspect.StructType):
        for part in parts(kind):
            yield from numbers(part)


def test_every_number_has_bounds() -> None:
    """One beyond them is refused at the door, and never met by a column or a sum."""
    unbounded = {
        f"{name}.{field.encode_name}"
        for name, kind in sent().items()
        if name not in REFUSED
        for field in kind.fields
        for number in numbers(field.type)
        if (number.ge is None and number.gt is None) or (number.le is None and number.lt is None)
    }
    assert unbounded == set(ANY_NUMBER)
