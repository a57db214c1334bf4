"""`flyball goodput`: how much of the elapsed time became training, what took the rest, and what to expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from flyball.cli.goodput import compare as goodput_compare
from flyball.cli.goodput import predict as goodput_predict
from flyball.cli.goodput import report as goodput_report
from flyball.cli.goodput import watch as goodput_watch
from flyball.cli.goodput.options import OutOption, write_out
from flyball.cli.goodput.query import with_query
from flyball.cli.goodput.sources import Query, find
from flyball.cli.reach.options import command_help
from flyball.contracts.errors import UsageError

app = typer.Typer(
    **command_help(
        "Report how much of the elapsed time became training, and what took the rest. `flyball goodput LOG` is short "
        "for `flyball goodput report LOG`.",
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


@app.command(
    "export",
    **command_help(
        "Write a run's goodput as Prometheus metrics, to stdout or to a file for the textfile collector.",
        "flyball goodput export --prometheus --job llama",
        "flyball goodput export --prometheus events.jsonl --out goodput.prom",
    ),
)
@with_query(without=("all_runs",))
def export(
    *,
    query: Query,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="use Prometheus' text exposition format")] = False,
    out: OutOption = None,
) -> None:
    """Replaces the file as a whole, as collectors require."""
    from goodput.show.exposition import exposition

    if not prometheus:
        raise UsageError(
            "An export needs a format.", hint="add --prometheus; `flyball goodput report` writes JSON and CSV"
        )
    write_out(exposition([find(query).report]), out)


_WORDS = ("report", "compare", "predict", "watch", "export", "-h", "--help")


def in_full(arguments: Sequence[str]) -> list[str]:
    """The words after `goodput`, with the default command `report` inserted if none is given."""
    return list(arguments) if arguments and arguments[0] in _WORDS else ["report", *arguments]
