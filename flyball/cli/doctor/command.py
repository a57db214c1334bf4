"""`flyball doctor`: check what this host needs, and say what mends it."""

from __future__ import annotations

import os
from collections import Counter
from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from flyball.cli.reach.options import command_help
from flyball.cli.show.output import Format, OutputOption, announce, printable, printed

COMMAND = command_help(
    "Check what this host needs: PyTorch, memory for checkpoints, folders, limits, clock, network, the supervisor and "
    "database that the environment names, what a daemon could watch, RDMA. Each line is ok, a warning or an error, "
    "with the command that mends it. The exit code is that of the first error, else 0.",
    "flyball doctor",
    "flyball doctor torch 'shared memory'",
    "flyball doctor --fix rdma",
    "flyball doctor -o json",
)


class Fix(StrEnum):
    RDMA = "rdma"


def command(
    *,
    subjects: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CHECK]...", help="only the checks that make these lines of the report"),
    ] = None,
    fix: Annotated[
        Fix | None, typer.Option("--fix", help="first mend this; rdma: make Debian's pyverbs importable here")
    ] = None,
    output: OutputOption = Format.TABLE,
) -> int:
    """Changes nothing without --fix. Returns the exit code."""
    from flyball.cli.doctor.checks import CHECKS, check_named
    from flyball.cli.doctor.findings import CheckedHost, Finding, exit_code, findings

    if fix is Fix.RDMA:
        from flyball.cli.doctor.fix_rdma import link_pyverbs

        announce(link_pyverbs())
    chosen = list(dict.fromkeys(map(check_named, subjects or ()))) or CHECKS
    found: list[Finding] = []
    for finding in findings(chosen, CheckedHost(dict(os.environ))):
        found.append(finding)
        if not output.is_for_programs:
            typer.echo(_line(finding.level, finding.subject, finding.detail))
            if finding.mend:
                typer.echo(_line("", "", f"Next step: {finding.mend}"))
    levels = Counter(finding.level.value for finding in found)
    if not printed(
        {"findings": [msgspec.to_builtins(finding) for finding in found], "exit_code": exit_code(found)}, output
    ):
        typer.echo(f"{levels['ok']} ok, {levels['warning']} warnings, {levels['error']} errors")
    return exit_code(found)


def _line(level: str, subject: str, text: str) -> str:
    return f"{level:8} {subject:16} {printable(text)}"
