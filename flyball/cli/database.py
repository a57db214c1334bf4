"""`flyball db` and `flyball replay`: commands that open a supervisor's database directly."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from flyball import __version__
from flyball.cli.policy_file import read_policy
from flyball.cli.reach.options import JobOption, command_help
from flyball.cli.show.output import Format, OutputOption, announce, print_table, printed
from flyball.cli.show.times import exact_clock

if TYPE_CHECKING:
    from flyball.contracts.decisions import Decision
    from services.store.read.replaying import OtherPolicyResult, ReplayResult

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
    from flyball.cli.show.progress import count_bar
    from services.store.sql.copying import copy_database, count_rows
    from services.store.sql.database import Database, open_existing

    old = open_existing(source)
    new = Database(target)
    try:
        with count_bar("copying rows:", count_rows(old)) as advance:
            rows = copy_database(old, new, advance)
    finally:
        old.close()
        new.close()
    if not printed({"rows": rows}, output):
        typer.echo(f"{sum(rows.values())} rows copied: {rows['jobs']} jobs, {rows['decisions']} decisions.")


REPLAY = command_help(
    "Check that this release makes the same decisions as those stored in a database. Runs the stored signals through "
    "the policy again, in a temporary copy. Exit code 0 if every decision is identical, 1 if not. With --policy, shows "
    "what another policy would have decided in the same situations.",
    "flyball replay --from-db sqlite:////var/lib/flyball/flyball.sqlite",
    "flyball replay --from-db mysql://flyball@db:3306/flyball --job train -o json",
    "flyball replay --from-db sqlite:////var/lib/flyball/flyball.sqlite --policy patient.toml",
)


def replay(
    *,
    from_db: Annotated[str, typer.Option("--from-db", help="URL of the supervisor's database (only read)")],
    job: JobOption = "",
    policy: Annotated[str, typer.Option(metavar="FILE", help="decide by these settings, in place of those then")] = "",
    output: OutputOption = Format.TABLE,
) -> int:
    """Returns the exit code."""
    from flyball.cli.show.progress import count_bar
    from services.store.read.replaying import replay_database, replay_with
    from services.store.sql.database import open_existing

    given = read_policy(policy)
    db = open_existing(from_db)
    try:
        with tempfile.TemporaryDirectory(prefix="flyball-replay-") as folder:
            with count_bar("replaying rounds:") as advance:
                if policy:
                    other = replay_with(db, Path(folder), given, job=job, advance=advance)
                else:
                    result = replay_database(db, Path(folder), job=job, advance=advance)
            if policy:
                _print_other(other, policy, output)
                return 0
    finally:
        db.close()
    if not printed(msgspec.to_builtins(result) | {"exact": result.is_exact}, output):
        _print_replay(result)
    return 0 if result.is_exact else 1


def _print_other(result: OtherPolicyResult, policy: str, output: Format) -> None:
    """Every decision then and now, with those that differ."""
    if output.is_for_programs:
        rows = [
            {"round": d.round, "at": d.at, "job": d.job, "incident_id": d.incident_id, "same": d.is_same}
            | {"then": _brief(d.then), "now": _brief(d.now)}
            for d in result.decisions
        ]
        printed({"rounds": result.rounds, "policy": policy, "decisions": rows}, output)
        return
    print_table(
        f"Decisions then, and by {policy}",
        ("at", "job", "incident", "then", "rule", "now", "rule", ""),
        (
            [exact_clock(d.at), d.job, d.incident_id]
            + [field for side in (d.then, d.now) for field in ((side.kind.value, side.rule) if side else ("-", ""))]
            + ["" if d.is_same else "differs"]
            for d in result.decisions
        ),
    )
    others = sum(not d.is_same for d in result.decisions)
    typer.echo(
        f"{len(result.decisions) - others} of {len(result.decisions)} decisions are the same, from {result.rounds} "
        "rounds. Each round is decided in the situation that there was: what would have followed is not known."
    )


def _brief(decision: Decision | None) -> dict[str, object] | None:
    if decision is None:
        return None
    names = ("decision_id", "kind", "rule", "reason")
    return {name: getattr(decision, name) for name in names}


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
