"""Options for reading a foreign log: `--map key=value,...`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import tzinfo
from typing import NamedTuple

from flyball.contracts.errors import UsageError
from goodput.read.importers import times

COLUMNS = ("at", "step", "rank", "step_s", "job_column")
KEYS = (*COLUMNS, "job", "tz", "at_format", "at_unit", "step_s_unit", "delimiter")


class ImportOptions(NamedTuple):
    """`columns` and the fields after it apply to CSV only."""

    job: str  # for logs that name none
    zone: tzinfo  # for times that name none
    columns: Mapping[str, str]  # key -> its column
    at_format: str  # of strptime; '': ISO 8601, or a number
    at_unit: str  # unit of a number
    step_s_unit: str
    delimiter: str


def options(mapping: Mapping[str, str] | None, *, job: str) -> ImportOptions:
    """Options from `--map`; `job` names the job of a log without a job name. Raises UsageError for an invalid key or
    value."""
    given = dict(mapping or {})
    if unknown := sorted(set(given) - set(KEYS)):
        raise UsageError(f"A log's map has no key {unknown[0]!r}.", hint=f"use {', '.join(KEYS)}")
    delimiter = {"tab": "\t", "comma": ","}.get(given.get("delimiter", ""), given.get("delimiter", ","))
    if len(delimiter) != 1:
        raise UsageError(f"The delimiter {delimiter!r} is not one character.", hint="use `;`, `comma` or `tab`")
    read = ImportOptions(
        job=given.get("job", job),
        zone=times.zone(given.get("tz", "")),
        columns={key: given[key] for key in COLUMNS if key in given},
        at_format=given.get("at_format", ""),
        at_unit=given.get("at_unit", "s"),
        step_s_unit=given.get("step_s_unit", "s"),
        delimiter=delimiter,
    )
    times.scale_of(read.at_unit)
    times.scale_of(read.step_s_unit)
    return read


def parse_mapping(text: str) -> dict[str, str]:
    """Parse `at=time,step=iter`. Raises UsageError for a part that is not `key=value`."""
    mapping = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value:
            raise UsageError(f"{part!r} is not a key=value pair.", hint="write --map at=time,step=iteration")
        mapping[key.strip()] = value
    return mapping
