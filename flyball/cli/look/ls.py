"""`flyball ls`: list the runs on this machine, or a supervisor's jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from flyball.cli.look.jobs_table import doing_word
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.local_runs import LocalRun, find_runs
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.places import ANSWERS_WITHIN_S, find_supervisor, state_root
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import Format, OutputOption, announce, print_table, printed, room
from flyball.cli.show.times import clock, iso, lasted
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError

WIDE = 110  # terminal columns needed to show the end time too

COMMAND = command_help(
    "List the runs on this machine, newest first, including finished ones. With --supervisor, list its jobs.",
    "flyball ls",
    "flyball ls --all -o json",
    "flyball ls --supervisor http://10.0.0.1:7370",
)


@with_supervisor()
def command(
    *,
    choice: SupervisorChoice,
    limit: Annotated[int, typer.Option("--limit", min=1, help="list at most this many")] = 20,
    all_runs: Annotated[bool, typer.Option("--all", help="list all, however many")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Read-only."""
    if choice.url or os.environ.get("FLYBALL_SUPERVISOR"):
        with choice.connect() as client:
            found = list(reversed(client.everything("/v1/jobs") if all_runs else client.newest("/v1/jobs", limit)))
        if printed({"supervisor": client.url, "jobs": found}, output):
            return
        _print(f"Jobs of {client.url}", [_from_api(job, client.url) for job in found])
        return
    runs = find_runs(os.environ, state_dir=choice.state_dir)
    shown = [_as_it_stands(run) for run in (runs if all_runs else runs[:limit])]
    if printed({"runs": [as_json(run) for run in shown]}, output):
        return
    root = Path(choice.state_dir) if choice.state_dir else state_root(os.environ)
    _print(f"Runs on this machine (in {_short(root)})", shown)
    if len(runs) > len(shown):
        announce(f"{len(runs) - len(shown)} older runs are not shown (--all lists them)")


def _as_it_stands(run: LocalRun) -> LocalRun:
    """The run with what it does now, if its supervisor says so soon."""
    if not run.url:
        return run
    try:
        found = find_supervisor(os.environ, state_dir=str(run.supervisor_dir))
        with ApiClient(found.url, found.token, timeout_s=ANSWERS_WITHIN_S) as client:
            return msgspec.structs.replace(run, doing=doing_word(client.get(f"/v1/jobs/{run.job}")))
    except FlyballError:
        return run


def as_json(run: LocalRun) -> dict[str, Any]:
    """A run for programs, with each time both in seconds since 1970 and as ISO 8601 text."""
    moments = {
        name.replace("_at", "_time"): iso(getattr(run, name))
        for name in ("submitted_at", "started_at", "ended_at", "supervisor_ended_at")
    }
    return (
        dict(msgspec.to_builtins(run, enc_hook=str))
        | moments
        | {"is_live": run.is_live, "duration_s": _duration_s(run)}
    )


def _duration_s(run: LocalRun) -> float | None:
    """Seconds from submission to the end of the job or its supervisor, or until now. None if unknown."""
    until = run.ended_at or run.supervisor_ended_at or (SystemClock().wall_s() if run.is_live else None)
    return max(until - run.submitted_at, 0.0) if until and run.submitted_at else None


def _from_api(job: dict[str, Any], url: str) -> LocalRun:
    known = {name: job[name] for name in LocalRun.__struct_fields__ if name in job}
    renamed = {"step": job["newest_step"], "restarts": job["restart_count"], "url": url, "doing": doing_word(job)}
    return LocalRun(**(known | renamed), folder=Path(), supervisor_dir=Path())


def _print(title: str, runs: list[LocalRun]) -> None:
    now = SystemClock().wall_s()
    is_wide = room() >= WIDE
    has_folders = any(run.folder != Path() for run in runs)
    columns = ["job", "state", "step", "started", *(["ended"] if is_wide else []), "took", "restarts"]
    rows = []
    for run in runs:
        ended = [clock(run.ended_at or run.supervisor_ended_at, now)] if is_wide else []
        step = None if run.step < 0 else run.step
        state = run.doing or run.state
        row = [run.job, state, step, clock(run.submitted_at, now), *ended, lasted(_duration_s(run)), run.restarts]
        rows.append([*row, _short(run.folder)] if has_folders else row)
    print_table(title, [*columns, "folder"] if has_folders else columns, rows)


def _short(folder: Path) -> str:
    """A folder relative to the state root or to the home folder, if it is inside."""
    root = state_root(os.environ)
    if folder != root and folder.is_relative_to(root):
        return str(folder.relative_to(root))
    return f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
