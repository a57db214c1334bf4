"""`python -m simulator.cli`: `run` tries many seeds or shows one, `check` reads a real database. For developers of the
supervisor.

A failed seed is printed with the command that repeats it; a seed always gives the same run.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Annotated

import msgspec
import typer

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from services.store.sql.database import open_existing
from simulator.checks.history import Saved
from simulator.database_check import check_database
from simulator.driver import Run, run
from simulator.world.events import BEGAN_AT

SHOWN_VIOLATIONS = 5
PROGRESS_EVERY = 50

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _top() -> None:
    """Simulate clusters with faults."""


@app.command("run")
def run_seeds(
    *,
    seeds: Annotated[int, typer.Option(help="how many seeds to try", min=1)] = 200,
    first: Annotated[int, typer.Option("--first-seed", help="the first seed", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="try only this seed", min=-1)] = -1,
    trace: Annotated[bool, typer.Option("--trace", help="print the events of each run, in order")] = False,
) -> None:
    """Try many seeds, or one. Exit code 1 if an invariant broke, an incident stayed open, or training did not
    recover."""
    tried = range(first, first + seeds) if seed < 0 else range(seed, seed + 1)
    failed, simulated_s, generations = 0, 0.0, 0
    broken: Counter[str] = Counter()
    for number, tried_seed in enumerate(tried, 1):
        done = run(tried_seed)
        simulated_s += done.simulated_s
        generations += done.generations
        if trace:
            _trace(done)
        if done.violations:
            failed += 1
            broken.update({violation.invariant for violation in done.violations})
            _complain(done)
        if number % PROGRESS_EVERY == 0 and number < len(tried):
            sys.stderr.write(f"{number} of {len(tried)} seeds, {failed} failed\n")
    typer.echo(
        f"{len(tried)} seeds, {failed} failed; {simulated_s / 3600.0:.1f} simulated hours, {generations} generations"
    )
    for invariant, count in broken.most_common():
        typer.echo(f"  {invariant}: {count} seeds")
    raise typer.Exit(1 if failed else 0)


@app.command("check")
def check(
    *,
    from_db: Annotated[str, typer.Option("--from-db", help="URL of a supervisor's database (read-only)")],
    bound_s: Annotated[float, typer.Option(help="maximum age of an open incident, in seconds")] = 600.0,
) -> None:
    """Check a real database for broken invariants. Exit code 1 if it has any."""
    try:
        db = open_existing(from_db)
        violations = check_database(db, now=SystemClock().wall_s(), bound_s=bound_s)
        db.close()
    except FlyballError as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(error.exit_code) from error
    for violation in violations:
        typer.echo(str(violation))
    typer.echo(f"{len(violations)} violations")
    raise typer.Exit(1 if violations else 0)


def _complain(done: Run) -> None:
    typer.echo(f"seed {done.seed} failed: {', '.join(map(str, done.faults))}")
    for violation in done.violations[:SHOWN_VIOLATIONS]:
        typer.echo(f"  {violation}")
    if len(done.violations) > SHOWN_VIOLATIONS:
        typer.echo(f"  and {len(done.violations) - SHOWN_VIOLATIONS} more")
    typer.echo(f"  again: python -m simulator.cli run --seed {done.seed} --trace")


def _trace(done: Run) -> None:
    lines = [
        (fact.at, f"{type(fact).__name__:12} {_fields(fact)}") for fact in done.facts if not isinstance(fact, Saved)
    ]
    for decided in done.record.decisions:
        decision = decided.decision
        what = f"dec-{decided.number} {decision.incident_id} {decision.kind.value} ({decision.rule}): {decision.reason}"
        lines.append((decision.at, f"{'Decision':12} epoch {decided.epoch} {what}"))
    for found in done.record.incidents:
        incident = found.incident
        what = f"{incident.incident_id} {incident.cause}, at last {incident.state.value}: {incident.message}"
        lines.append((incident.opened_at, f"{'Incident':12} {what}"))
    typer.echo(f"seed {done.seed}: {done.scenario}")
    for at, line in sorted(lines, key=lambda item: item[0]):
        typer.echo(f"{at - BEGAN_AT:9.3f} s  {line}")


def _fields(fact: msgspec.Struct) -> str:
    return ", ".join(f"{name}={getattr(fact, name)}" for name in fact.__struct_fields__ if name != "at")


if __name__ == "__main__":
    app()
