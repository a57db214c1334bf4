"""`flyball goodput watch`: the report, live, until the job has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from flyball.cli.goodput.query import with_query
from flyball.cli.goodput.sources import Query, find
from flyball.cli.goodput.times import parse_duration
from flyball.cli.reach.options import examples
from flyball.cli.show.output import Format, OutputOption, moment, printable, say
from flyball.cli.signals import EndSignals
from flyball.contracts.errors import TooBusy, Unreachable

if TYPE_CHECKING:
    from goodput.calculator import GoodputReport

LOOK_EVERY_S = 0.1  # whether somebody wants it to end
BUSY_SHARE = 0.25  # at most this part of the time is spent on reading and calculating

COMMAND: dict[str, Any] = {
    "help": "Watch a run's goodput live: at a supervisor, or in an event log that grows. Ends with the job, or Ctrl-C.",
    "epilog": examples(
        "flyball goodput watch --job llama",
        "flyball goodput watch events.jsonl --every 5s",
        "flyball goodput watch --job llama -o json | jq .goodput",
    ),
}


@with_query(without=("until", "strict"))
def command(
    *,
    query: Query,
    every: Annotated[str, typer.Option("--every", help="how often to look")] = "2s",
    output: OutputOption = Format.TABLE,
) -> int:
    """A screen on a terminal, else a line per look; with -o json the whole report, one object per line. Exit code 0
    also after Ctrl-C: that is how it is left."""
    query = msgspec.structs.replace(query, quiet=True)
    every_s = max(LOOK_EVERY_S, parse_duration("--every", every))
    console = Console()
    with EndSignals(("SIGTERM",)) as signals:
        try:
            looks = _looks(query, every_s, signals)
            if output is Format.JSON or not console.is_terminal:
                _tell(looks, _json_line if output is Format.JSON else _line)
            else:
                _show(looks, console)
        except KeyboardInterrupt:
            pass
    return signals.exit_code


def _looks(query: Query, every_s: float, signals: EndSignals) -> Iterator[tuple[GoodputReport, str]]:
    """The report as often as it may have changed, and why it is an old one ('' if it is not), until the job ended. What
    is wrong at the first look raises; later on a supervisor that is away is waited for."""
    report: GoodputReport | None = None
    is_final = False
    seen: object = None
    while not signals.count:
        began_s = time.monotonic()
        trouble = ""
        try:
            stamp = _stamp(query.logs)
            if report is None or stamp is None or stamp != seen:
                found = find(query)
                report, is_final, seen = found.report, found.is_final, stamp
        except (Unreachable, TooBusy) as error:
            if report is None:
                raise
            trouble = error.message
        yield report, trouble
        if report.outcome or is_final:
            return
        now_s = time.monotonic()
        next_s = max(began_s + every_s, now_s + (now_s - began_s) * (1.0 / BUSY_SHARE - 1.0))
        while not signals.count and (left_s := next_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_EVERY_S))


def _stamp(logs: Sequence[Path]) -> object:
    """What changes whenever one of the files does; None without files."""
    from goodput.read.event_files import log_files

    if not logs:
        return None
    states = [(path, path.stat()) for path in log_files(logs) if path.exists()]
    return [(path, state.st_size, state.st_mtime_ns) for path, state in states]


def _tell(looks: Iterable[tuple[GoodputReport, str]], line: Callable[[GoodputReport], str]) -> None:
    away = ""
    for report, trouble in looks:
        if trouble:
            if trouble != away:
                say(trouble)
        else:
            sys.stdout.write(line(report) + "\n")
            sys.stdout.flush()
        away = trouble


def _json_line(report: GoodputReport) -> str:
    return msgspec.json.encode(report).decode()


def _line(report: GoodputReport) -> str:
    from goodput.wording import counted, percent, seconds

    windowed = report.ettr_window
    rolling = f" ({percent(windowed.last)} in the last {seconds(windowed.window_s)})" if windowed else ""
    return printable(
        f"{moment(report.ended_at)}  {report.job or 'run'}: goodput {percent(report.goodput)}, "
        f"ETTR {percent(report.ettr)}{rolling} of {seconds(report.elapsed_s)}, newest step {report.steps.newest}, "
        f"{counted(report.interruptions, 'interruption')} ({report.outcome or 'running'})"
    )


def _show(looks: Iterable[tuple[GoodputReport, str]], console: Console) -> None:
    from goodput.show.report import render_live

    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        for report, trouble in looks:
            below = f"{printable(trouble)} Asking again." if trouble else "" if report.outcome else "Ctrl-C ends it."
            room = console.height - len(console.render_lines(Text(below)))

            def fits(shown: RenderableType, room: int = room if not report.outcome else sys.maxsize) -> bool:
                return len(console.render_lines(shown)) <= room

            live.update(Group(render_live(report, fits), Text(below)), refresh=True)
