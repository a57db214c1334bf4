"""`flyball ls`: the runs of this machine, or the jobs of a supervisor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from flyball.cli.reach.local_runs import LocalRun, find_runs
from flyball.cli.reach.options import StateDirOption, SupervisorOption, TokenFileOption, connect, examples
from flyball.cli.reach.places import state_root
from flyball.cli.show.output import Format, OutputOption, print_json, print_table, say
from flyball.cli.show.times import clock, iso, lasted
from flyball.contracts.clock import SystemClock

WIDE = 110  # columns of a terminal that has room for the end and the whole folder

COMMAND: dict[str, Any] = {
    "help": "List the runs of this machine, newest first, those that have ended too. With --supervisor: its jobs.",
    "epilog": examples("flyball ls", "flyball ls --all -o json", "flyball ls --supervisor http://10.0.0.1:7370"),
}


def command(
    *,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="how many to show")] = 20,
    all_runs: Annotated[bool, typer.Option("--all", help="show all")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """One look; nothing is changed."""
    if supervisor or os.environ.get("FLYBALL_SUPERVISOR"):
        with connect(supervisor, token_file, state_dir) as client:
            found = list(reversed(client.everything("/v1/jobs") if all_runs else client.newest("/v1/jobs", limit)))
        if output is Format.JSON:
            print_json({"supervisor": client.url, "jobs": found})
            return
        _show(f"Jobs of {client.url}", [_from_api(job, client.url) for job in found])
        return
    runs = find_runs(os.environ, state_dir=state_dir)
    shown = runs if all_runs else runs[:limit]
    if output is Format.JSON:
        print_json({"runs": [as_json(run) for run in shown]})
        return
    _show(f"Runs on this machine (in {_short(Path(state_dir) if state_dir else state_root(os.environ))})", shown)
    if len(runs) > len(shown):
        say(f"{len(runs) - len(shown)} older runs are not shown (--all)")


def as_json(run: LocalRun) -> dict[str, Any]:
    """A run for programs: moments in seconds since 1970, and as text."""
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
    """From the submission to the end, of the job or else of its supervisor, or until now."""
    until = run.ended_at or run.supervisor_ended_at or (SystemClock().wall_s() if run.is_live else None)
    return max(until - run.submitted_at, 0.0) if until and run.submitted_at else None


def _from_api(job: dict[str, Any], url: str) -> LocalRun:
    known = {name: job[name] for name in LocalRun.__struct_fields__ if name in job}
    renamed = {"step": job["newest_step"], "restarts": job["restart_count"], "url": url}
    return LocalRun(**known, **renamed, folder=Path(), supervisor_dir=Path())


def _show(title: str, runs: list[LocalRun]) -> None:
    now = SystemClock().wall_s()
    is_wide = Console().width >= WIDE
    has_folders = any(run.folder != Path() for run in runs)
    columns = ["job", "state", "step", "started", *(["ended"] if is_wide else []), "took", "restarts"]
    rows = []
    for run in runs:
        ended = [clock(run.ended_at or run.supervisor_ended_at, now)] if is_wide else []
        step = None if run.step < 0 else run.step
        row = [run.job, run.state, step, clock(run.submitted_at, now), *ended, lasted(_duration_s(run)), run.restarts]
        rows.append([*row, _short(run.folder)] if has_folders else row)
    print_table(title, [*columns, "folder"] if has_folders else columns, rows)


def _short(folder: Path) -> str:
    """A folder without what all have in common: the state root, or the home."""
    root = state_root(os.environ)
    if folder != root and folder.is_relative_to(root):
        return str(folder.relative_to(root))
    return f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
