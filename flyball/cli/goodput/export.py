"""`flyball goodput export --prometheus`: the report as metrics, for a textfile collector."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flyball.cli.goodput.options import OutOption, write_out
from flyball.cli.goodput.query import with_query
from flyball.cli.goodput.sources import Query, find
from flyball.cli.reach.options import examples
from flyball.contracts.errors import UsageError

COMMAND: dict[str, Any] = {
    "help": "Write a run's goodput as Prometheus metrics, to stdout or a file of the textfile collector.",
    "epilog": examples(
        "flyball goodput export --prometheus --job llama",
        "flyball goodput export --prometheus events.jsonl --out goodput.prom",
    ),
}


@with_query()
def command(
    *,
    query: Query,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Prometheus' text exposition format")] = False,
    out: OutOption = None,
) -> None:
    """A file is replaced as a whole, as collectors ask for."""
    from goodput.show.exposition import exposition

    if not prometheus:
        raise UsageError("Export to what?", hint="add --prometheus; `flyball goodput report` has json and csv")
    write_out(exposition([find(query).report]), out)
