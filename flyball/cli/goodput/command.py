"""`flyball goodput`: how much of the time became training, what took the rest, and what to expect."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from flyball.cli.goodput import compare as goodput_compare
from flyball.cli.goodput import export as goodput_export
from flyball.cli.goodput import predict as goodput_predict
from flyball.cli.goodput import report as goodput_report
from flyball.cli.goodput import watch as goodput_watch
from flyball.cli.reach.options import examples

app = typer.Typer(
    help="Report how much of the time became training, and what took the rest. `flyball goodput LOG` is short for "
    "`flyball goodput report LOG`.",
    epilog=examples(
        "flyball goodput --job llama",
        "flyball goodput events.jsonl -o json",
        "flyball goodput compare before.jsonl after.jsonl",
        "flyball goodput predict --job llama",
        "flyball goodput watch --job llama",
    ),
    no_args_is_help=False,
)
app.command("report", **goodput_report.COMMAND)(goodput_report.command)
app.command("compare", **goodput_compare.COMMAND)(goodput_compare.command)
app.command("predict", **goodput_predict.COMMAND)(goodput_predict.command)
app.command("watch", **goodput_watch.COMMAND)(goodput_watch.command)
app.command("export", **goodput_export.COMMAND)(goodput_export.command)

_NAMED = ("report", "compare", "predict", "watch", "export", "-h", "--help")


def in_full(arguments: Sequence[str]) -> list[str]:
    """What follows `goodput`, with its command: without one it is `report`."""
    return list(arguments) if arguments and arguments[0] in _NAMED else ["report", *arguments]
