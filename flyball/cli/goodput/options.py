"""Options for the output of the goodput commands: method, format, and file."""

from __future__ import annotations

import os
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flyball.contracts.errors import ConfigurationError, UsageError

StepFlopsOption = Annotated[
    float | None,
    typer.Option("--model-flops-per-step", help="FLOPs that one step of the whole job takes (to compute MFU)"),
]
PeakFlopsOption = Annotated[
    float | None, typer.Option("--peak-flops-per-gpu", help="peak FLOP/s of one GPU (to compute MFU)")
]
BinsOption = Annotated[
    int, typer.Option("--timeline-bins", min=0, max=1000, help="also write the time in so many slices (JSON, YAML)")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="write to this file instead of stdout")]


class Method(StrEnum):
    FLYBALL = "flyball"
    GOOGLE_RESILIENCY = "google-resiliency"


MethodOption = Annotated[
    Method, typer.Option("--method", help="google-resiliency uses the formula and JSON keys of Google's calculator")
]
ReferenceOption = Annotated[
    float | None,
    typer.Option("--reference-step-time", help="seconds that one step should take"),
]


class ReportFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"
    HTML = "html"


class ComparisonFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


_FORMAT = typer.Option("-o", "--output", help="output format (default: by the extension of --out, else table)")
ReportFormatOption = Annotated[ReportFormat | None, _FORMAT]
ComparisonFormatOption = Annotated[ComparisonFormat | None, _FORMAT]


def choose_format(
    asked: ReportFormat | ComparisonFormat | None,
    out: Path | None,
    allowed: type[ReportFormat | ComparisonFormat] = ReportFormat,
) -> ReportFormat:
    """The requested format, else the one of the file's extension, else a table. Raises UsageError."""
    by_suffix = {f".{f.value}": f for f in ReportFormat if f is not ReportFormat.TABLE}
    chosen = (ReportFormat(asked) if asked else by_suffix.get(out.suffix) if out else None) or ReportFormat.TABLE
    if chosen not in list(allowed):  # by the extension of --out
        raise UsageError(f"This command cannot write {chosen}.", hint=f"use one of: {', '.join(allowed)}")
    if chosen is ReportFormat.HTML and out is None and sys.stdout.isatty():
        raise UsageError("An HTML report cannot be shown on a terminal.", hint="add --out report.html")
    return chosen


def write_out(text: str, out: Path | None) -> None:
    """Write to the file, completely or not at all, or to stdout."""
    if not text.endswith("\n"):
        text += "\n"
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        descriptor, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            mask = os.umask(0)
            os.umask(mask)
            Path(temporary).chmod(0o666 & ~mask)
            Path(temporary).replace(out)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write {out}: {error.strerror}.", hint="name a file in an existing folder with free space"
        ) from error
