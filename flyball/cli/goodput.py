"""`flyball goodput`: how much of the time became training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from flyball.cli.options import JobOption, StateDirOption, SupervisorOption, TokenFileOption, connect, examples
from flyball.cli.output import Format, OutputOption, print_json, say
from flyball.contracts.errors import NotFound, UsageError

COMMAND: dict[str, Any] = {
    "help": "Report a job's goodput and where the rest of its time went, from a supervisor or from event log files.",
    "epilog": examples("flyball goodput --job llama", "flyball goodput events.jsonl -o json"),
}


def command(
    *,
    logs: Annotated[list[Path] | None, typer.Argument(help="event logs, one JSON object per line")] = None,
    job: JobOption = "",
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Text on a terminal, the whole report with -o json."""
    from goodput.calculator import Report
    from goodput.report import to_json, to_text

    report = _from_logs(logs, job) if logs else _from_supervisor(job, supervisor, token_file, state_dir, Report)
    if output is Format.JSON:
        print_json(to_json(report))
    else:
        typer.echo(to_text(report, width=_width()))


def _from_logs(logs: list[Path], job: str) -> Any:  # noqa: ANN401 - goodput.calculator.Report, imported late
    from goodput.calculator import calculate
    from goodput.events import read_logs

    read = read_logs(logs)
    if read.malformed_count:
        say(f"{read.malformed_count} lines are no events and were left out, the first: {read.malformed[0]}")
    return calculate(read.events, job=job or None)


def _from_supervisor(job: str, supervisor: str, token_file: str, state_dir: str, kind: type[Any]) -> Any:  # noqa: ANN401
    with connect(supervisor, token_file, state_dir) as client:
        if not job:
            names = [j.get("job") or j["spec"]["job"] for j in client.items("/v1/jobs")]
            if not names:
                raise NotFound("The supervisor knows no job.", hint="submit one with `flyball run`")
            if len(names) > 1:
                raise UsageError(f"There are several jobs: {', '.join(names)}.", hint="choose one with --job NAME")
            job = names[0]
        return msgspec.convert(client.get("/v1/goodput", job=job), kind)


def _width() -> int:
    try:
        return min(120, os.get_terminal_size().columns)
    except OSError:
        return 100
