"""The option --calibrate: times of a scenario from a measured run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from flyball.cli.show.messages import announce
from flyball.contracts import wire
from flyball.contracts.errors import UsageError

if TYPE_CHECKING:
    from goodput.calculator import GoodputReport
    from simulator.planning.calibration import Calibration

Calibrate = Annotated[
    str,
    typer.Option(
        "--calibrate",
        metavar="MEASURED",
        help="take detection, stop, start and restore times from a run: the JSON of `flyball demo` or `flyball goodput "
        "report`, an event log, or a database URL; --set goes over them",
    ),
]


def calibration(measured: str) -> tuple[str, ...]:
    """The settings that a measured run gives, after saying which they are; none for ''."""
    if not measured:
        return ()
    from simulator.planning.calibration import in_words

    found = _read(measured)
    for line in in_words(found):
        announce(line)
    return found.settings


def _read(measured: str) -> Calibration:
    from flyball.cli.goodput.sources import Query, find
    from flyball.cli.reach.sources import SupervisorChoice
    from simulator.planning.calibration import from_demo, from_report

    if "://" in measured:
        return from_report(find(Query(choice=SupervisorChoice(database_url=measured))).report, "the database")
    document = _object(Path(measured))
    if "faults" in document and "losses_compared" in document:
        return from_demo(document, measured)
    if "seconds_by_category" in document:
        return from_report(_report(document, measured), measured)
    return from_report(find(Query(logs=(Path(measured),))).report, measured)


def _report(document: dict[str, Any], measured: str) -> GoodputReport:
    from goodput.calculator import GoodputReport

    try:
        return wire.convert(document, GoodputReport)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{measured} is no goodput report: {error}.", hint="write it with `flyball goodput report -o json`"
        ) from error


def _object(file: Path) -> dict[str, Any]:
    """A file's JSON object; {} if it is another file, such as an event log, which has one object per line."""
    try:
        found = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}
