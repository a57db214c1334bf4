"""Which state a command looks at: that of a supervisor that runs, or what one left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.local_runs import DATABASE, UNREADABLE, LocalRun, find_run, find_runs, has_state, runs_in
from flyball.cli.reach.places import find_supervisor, live_folders, live_record, supervisor_dir
from flyball.cli.show.output import say
from flyball.contracts.errors import NotFound, UsageError


def connect_live(
    environ: Mapping[str, str], *, url: str = "", token_file: str = "", state_dir: str = "", job: str = ""
) -> ApiClient:
    """A client of the supervisor that is named, else of the one that runs here and, with `job`, knows that.

    Raises NotFound, UsageError if several run and none is chosen, Unauthorized.
    """
    if not (url or state_dir or environ.get("FLYBALL_SUPERVISOR")):
        state_dir = str(_choose_live(environ, job) or "")
    found = find_supervisor(environ, url=url, token_file=token_file, state_dir=state_dir)
    return ApiClient(found.url, found.token)


def look_at(
    environ: Mapping[str, str],
    *,
    url: str = "",
    token_file: str = "",
    state_dir: str = "",
    job: str = "",
    database_url: str = "",
) -> ApiClient:
    """A client that only reads: from what is named, else from a supervisor that runs here, else from what a run left
    here. Of those, one of `job`.

    Raises NotFound, UsageError if several run and none is chosen, Unauthorized, StateVersionMismatch.
    """
    if database_url:
        return LeftState(database_url)
    is_named = bool(url or environ.get("FLYBALL_SUPERVISOR"))
    if state_dir and not is_named:
        is_live = any(live_record(folder) for folder in (Path(state_dir), Path(state_dir) / "supervisor"))
    else:
        is_live = is_named or _choose_live(environ, job) is not None
    if is_live:
        return connect_live(environ, url=url, token_file=token_file, state_dir=state_dir, job=job)
    if not state_dir and (configured := environ.get("FLYBALL_DATABASE_URL")):
        return LeftState(configured)
    run = _left_run(environ, job, state_dir)
    return LeftState(f"sqlite:///{run.supervisor_dir.resolve() / DATABASE}", folder=run.folder)


def _choose_live(environ: Mapping[str, str], job: str) -> Path | None:
    """The folder of a supervisor that runs here: of one that knows the job if one is named, else of the only one."""
    live = live_folders(environ)
    if job:
        up = supervisor_dir(environ)
        known = [folder for folder in live if any(run.job == job for run in runs_in(folder) if has_state(folder))]
        runs_first = sorted(known, key=lambda folder: folder == up)
        # What one knows whose database is elsewhere, only itself can say.
        return next(iter(runs_first or [folder for folder in live if folder == up and not has_state(up)]), None)
    if len(live) > 1:
        jobs = {folder: [run.job for run in runs_in(folder)] if has_state(folder) else [] for folder in live}
        names = sorted({name for found in jobs.values() for name in found})
        raise UsageError(
            "Several supervisors run on this machine: "
            + ", ".join(f"{', '.join(found) or 'no job'} (in {folder})" for folder, found in jobs.items())
            + ".",
            hint=" or ".join([*(f"--job {name}" for name in names), "--state-dir DIR"]) + " chooses one",
        )
    return live[0] if live else None


def _left_run(environ: Mapping[str, str], job: str, state_dir: str) -> LocalRun:
    """The newest run of that job, or of all, whose supervisor has ended."""
    if job:
        return find_run(environ, job, state_dir=state_dir)
    runs = [run for run in find_runs(environ, state_dir=state_dir) if run.state != UNREADABLE]
    if not runs:
        where = f"in {state_dir}" if state_dir else "on this machine"
        raise NotFound(
            f"No supervisor runs {where}, and none left the state of a job there.",
            hint="start one with `flyball run` or `flyball up`, or name one: --supervisor URL, its folder with "
            "--state-dir DIR, or its database with --database-url URL",
        )
    if len(runs) > 1 and not state_dir:
        say(f"no supervisor runs here; this is what the newest run left, {runs[0].job} (--job NAME: another)")
    return runs[0]
