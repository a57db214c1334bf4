"""`flyball db` and `flyball replay`: commands that open a supervisor's database directly."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from flyball import __version__
from flyball.cli.reach.options import JobOption, command_help
from flyball.cli.show.output import Format, OutputOption, announce, print_json

if TYPE_CHECKING:
    from services.store.read.replaying import ReplayResult

DIFFERENCES_SHOWN = 20  # in the text output; JSON has all

app = typer.Typer(
    **command_help(
        "Back up or move the supervisor's database.",
        "flyball db copy sqlite:////var/lib/flyball/flyball.sqlite sqlite:////backup/flyball-monday.sqlite",
    ),
    no_args_is_help=True,
)


@app.command(
    "copy",
    **command_help(
        "Copy a database, as of one moment, into a new file or an empty database. For a backup, the supervisor may "
        "keep running. For a move, stop it first: only one of the two databases may have a supervisor.",
        "flyball db copy sqlite:////var/lib/flyball/flyball.sqlite sqlite:////backup/flyball-monday.sqlite",
        "flyball db copy sqlite:////var/lib/flyball/flyball.sqlite mysql://flyball:SECRET@db:3306/flyball",
    ),
)
def copy(
    source: Annotated[str, typer.Argument(help="URL of the database to copy (only read)")],
    target: Annotated[str, typer.Argument(help="URL of a file that does not exist yet, or of an empty database")],
    output: OutputOption = Format.TABLE,
) -> None:
    from services.store.sql.copying import copy_database
    from services.store.sql.database import Database, open_existing

    old = open_existing(source)
    new = Database(target)
    try:
        rows = copy_database(old, new)
    finally:
        old.close()
        new.close()
    if output is Format.JSON:
        print_json({"rows": rows})
    else:
        typer.echo(f"{sum(rows.values())} rows copied: {rows['jobs']} jobs, {rows['decisions']} decisions.")


REPLAY = command_help(
    "Check that this release makes the same decisions as those stored in a database. Runs the stored signals through "
    "the policy again, in a temporary copy. Exit code 0 if every decision is identical, 1 if not.",
    "flyball replay --from-db sqlite:////var/lib/flyball/flyball.sqlite",
    "flyball replay --from-db mysql://flyball@db:3306/flyball --job train -o json",
)


def replay(
    *,
    from_db: Annotated[str, typer.Option("--from-db", help="URL of the supervisor's database (only read)")],
    job: JobOption = "",
    output: OutputOption = Format.TABLE,
) -> int:
    """Returns the exit code."""
    from services.store.read.replaying import replay_database
    from services.store.sql.database import open_existing

    db = open_existing(from_db)
    try:
        with tempfile.TemporaryDirectory(prefix="flyball-replay-") as folder:
            result = replay_database(db, Path(folder), job=job)
    finally:
        db.close()
    if output is Format.JSON:
        print_json(msgspec.to_builtins(result) | {"exact": result.is_exact})
    else:
        _print_replay(result)
    return 0 if result.is_exact else 1


def _print_replay(result: ReplayResult) -> None:
    others = [version for version in result.versions if version != __version__]
    if others:
        announce(f"the decisions were made by release {', '.join(others)}; this is {__version__}")
    if result.before:
        announce(f"{result.before} older decisions are left out: their input is no longer kept")
    rounds = f"{result.rounds} rounds with {result.signals} signals"
    if result.is_exact:
        typer.echo(f"{result.reproduced} decisions reproduced, from {rounds}.")
        return
    typer.echo(f"{result.reproduced} decisions reproduced, from {rounds}; these were not:")
    for name in result.missing[:DIFFERENCES_SHOWN]:
        typer.echo(f"  {name}: its input was not kept")
    for what in result.differences[:DIFFERENCES_SHOWN]:
        typer.echo(f"  {what}")
    more = len(result.missing[DIFFERENCES_SHOWN:]) + len(result.differences[DIFFERENCES_SHOWN:])
    if more:
        typer.echo(f"  and {more} more (-o json lists all)")
