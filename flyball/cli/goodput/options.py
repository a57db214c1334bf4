"""What the goodput commands give: by which method, in which format, and where it goes."""

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
    float | None, typer.Option("--model-flops-per-step", help="of the model, in one step of the job; for MFU")
]
PeakFlopsOption = Annotated[float | None, typer.Option("--peak-flops-per-gpu", help="per second; for MFU")]
OutOption = Annotated[Path | None, typer.Option("--out", help="write to this file instead of stdout")]


class Method(StrEnum):
    FLYBALL = "flyball"
    GOOGLE_RESILIENCY = "google-resiliency"


MethodOption = Annotated[
    Method, typer.Option("--method", help="google-resiliency: that calculator's own formula and JSON keys")
]
ReferenceOption = Annotated[
    float | None,
    typer.Option("--reference-step-time", help="seconds that a step should take"),
]


class ReportFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


ReportFormatOption = Annotated[
    ReportFormat | None,
    typer.Option("-o", "--output", help="output format (default: by the extension of --out, else table)"),
]


def choose_format(asked: ReportFormat | None, out: Path | None, allowed: tuple[ReportFormat, ...]) -> ReportFormat:
    """The format that was asked for, else the one that the file's name asks for. Raises UsageError."""
    by_suffix = {f".{f.value}": f for f in (ReportFormat.JSON, ReportFormat.CSV, ReportFormat.HTML)}
    chosen = asked or (by_suffix.get(out.suffix) if out else None) or ReportFormat.TABLE
    if chosen not in allowed:
        raise UsageError(f"-o {chosen} is not offered here.", hint=f"one of: {', '.join(allowed)}")
    if chosen is ReportFormat.HTML and out is None and sys.stdout.isatty():
        raise UsageError("An HTML report is a file, not something for a terminal.", hint="add --out report.html")
    return chosen


def write_out(text: str, out: Path | None) -> None:
    """To the file, as a whole or not at all, else to stdout."""
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
            f"Cannot write {out}: {error.strerror}.", hint="name a file in a folder that is there, with room in it"
        ) from error
