"""`flyball goodput watch`: show the report live until the job has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from flyball.cli.goodput.query import with_query
from flyball.cli.goodput.sources import Query, find
from flyball.cli.reach.options import command_help
from flyball.cli.show.given_times import parse_duration
from flyball.cli.show.output import Format, OutputOption, announce, printable, record
from flyball.cli.show.times import exact_clock
from flyball.cli.signals import EndSignals
from flyball.contracts.errors import TooBusy, Unreachable

if TYPE_CHECKING:
    from goodput.calculator import GoodputReport

SIGNAL_CHECK_INTERVAL_S = 0.1
BUSY_SHARE = 0.25  # spend at most this share of the time on reading and calculating

COMMAND = command_help(
    "Watch a run's goodput live, from a supervisor or from a growing event log. Ends with the job, or at Ctrl-C.",
    "flyball goodput watch --job llama",
    "flyball goodput watch events.jsonl --every 5s",
    "flyball goodput watch --job llama -o json | jq .goodput",
)


@with_query(without=("until", "strict", "all_runs"))
def command(
    *,
    query: Query,
    every: Annotated[str, typer.Option("--every", help="time between two updates")] = "2s",
    output: OutputOption = Format.TABLE,
) -> int:
    """Updates a screen on a terminal, else prints a line per update. With -o json: one report per line.

    Exit code 0 after Ctrl-C, too: that is the normal way to leave.
    """
    query = msgspec.structs.replace(query, quiet=True)
    every_s = max(SIGNAL_CHECK_INTERVAL_S, parse_duration("--every", every))
    console = Console()
    with EndSignals(("SIGTERM",)) as signals:
        try:
            updates = _updates(query, every_s, signals)
            if output.is_for_programs or not console.is_terminal:
                _print_lines(updates, partial(record, output=output) if output.is_for_programs else _line)
            else:
                _show_live(updates, console)
        except KeyboardInterrupt:
            pass
    return signals.exit_code


def _updates(query: Query, every_s: float, signals: EndSignals) -> Iterator[tuple[GoodputReport, str]]:
    """Yield the report until the job ends, each time with the reason why it could not be updated ('' if it could).

    Errors at the first attempt are raised; later, an unreachable supervisor is waited for.
    """
    report: GoodputReport | None = None
    is_final = False
    last_stamp: object = None
    while not signals.count:
        began_s = time.monotonic()
        trouble = ""
        try:
            stamp = _stamp(query.logs)
            if report is None or stamp is None or stamp != last_stamp:
                found = find(query)
                report, is_final, last_stamp = found.report, found.is_final, stamp
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
            time.sleep(min(left_s, SIGNAL_CHECK_INTERVAL_S))


def _stamp(logs: Sequence[Path]) -> object:
    """A value that changes whenever one of the files does; None without files."""
    from goodput.read.event_files import log_files

    if not logs:
        return None
    states = [(path, path.stat()) for path in log_files(logs) if path.exists()]
    return [(path, state.st_size, state.st_mtime_ns) for path, state in states]


def _print_lines(updates: Iterable[tuple[GoodputReport, str]], line: Callable[[GoodputReport], str]) -> None:
    last_trouble = ""
    for report, trouble in updates:
        if trouble:
            if trouble != last_trouble:
                announce(trouble)
        else:
            sys.stdout.write(line(report))
            sys.stdout.flush()
        last_trouble = trouble


def _line(report: GoodputReport) -> str:
    from goodput.wording import counted, percent, seconds

    windowed = report.ettr_window
    rolling = f" ({percent(windowed.last)} in the last {seconds(windowed.window_s)})" if windowed else ""
    return printable(
        f"{exact_clock(report.ended_at)}  {report.job or 'run'}: goodput {percent(report.goodput)}, "
        f"ETTR {percent(report.ettr)}{rolling} of {seconds(report.elapsed_s)}, newest step {report.steps.newest}, "
        f"{counted(report.interruptions, 'interruption')} ({report.outcome or 'running'})\n"
    )


def _show_live(updates: Iterable[tuple[GoodputReport, str]], console: Console) -> None:
    from goodput.show.report import render_live

    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        for report, trouble in updates:
            below = f"{printable(trouble)} Retrying." if trouble else "" if report.outcome else "Press Ctrl-C to quit."
            room = console.height - len(console.render_lines(Text(below)))

            def fits(shown: RenderableType, room: int = room if not report.outcome else sys.maxsize) -> bool:
                return len(console.render_lines(shown)) <= room

            live.update(Group(render_live(report, fits), Text(below)), refresh=True)
