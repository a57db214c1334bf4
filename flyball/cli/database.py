"""`flyball db`: the supervisor's database as a whole."""

from __future__ import annotations

from typing import Annotated

import typer

from flyball.cli.reach.options import examples
from flyball.cli.show.output import Format, OutputOption, print_json

app = typer.Typer(help="Back up or move the supervisor's database.", no_args_is_help=True)


@app.command(
    "copy",
    help="Copy a database into a new file or an empty database, as of one moment. For a backup the supervisor may run; "
    "for a move it must not: of the two only one may have a supervisor.",
    epilog=examples(
        "flyball db copy sqlite:////var/lib/flyball/flyball.sqlite sqlite:////backup/flyball-monday.sqlite",
        "flyball db copy sqlite:////var/lib/flyball/flyball.sqlite mysql://flyball:SECRET@db:3306/flyball",
    ),
)
def copy(
    source: Annotated[str, typer.Argument(help="URL of the database; it is only read")],
    target: Annotated[str, typer.Argument(help="URL of a file that does not exist, or of an empty database")],
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
