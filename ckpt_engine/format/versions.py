"""What a reader does with a format that is newer than itself. Pure."""

from __future__ import annotations

from flyball import __version__
from flyball.contracts.errors import NewerFormat


def refuse_newer(what: str, version: int, reads: int, written_by: str = "") -> None:
    """Raise NewerFormat if `what` has a newer format than the `reads` of this release. `written_by`: the release that
    wrote it, if it says so."""
    if version > reads:
        raise NewerFormat(
            f"{what} has format {version}; this release of Flyball ({__version__}) reads up to {reads}.",
            hint=f"use Flyball {written_by or 'of the release that wrote it'}, or newer",
        )
