"""Options that several commands share: which supervisor, and how to prove oneself to it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.local_runs import DATABASE, UNREADABLE, LocalRun, find_run, find_runs, has_state, runs_in
from flyball.cli.reach.places import find_supervisor, live_folders, live_record, supervisor_dir
from flyball.cli.show.output import say
from flyball.contracts.errors import NotFound, UsageError

SupervisorOption = Annotated[
    str, typer.Option("--supervisor", help="address of the supervisor (default: FLYBALL_SUPERVISOR, or this machine's)")
]
TokenFileOption = Annotated[
    str, typer.Option("--token-file", help="file with its token (default: FLYBALL_TOKEN, or its state folder's)")
]
StateDirOption = Annotated[str, typer.Option("--state-dir", help="its state folder, if it runs on this machine")]
CaFileOption = Annotated[
    str, typer.Option("--ca-file", help="PEM file of the CA that signed its certificate (default: FLYBALL_CA_FILE)")
]
ClientCertOption = Annotated[
    str,
    typer.Option("--client-cert-file", help="PEM file of the client certificate (default: FLYBALL_CLIENT_CERT_FILE)"),
]
ClientKeyOption = Annotated[
    str, typer.Option("--client-key-file", help="PEM file of that certificate's key (default: FLYBALL_CLIENT_KEY_FILE)")
]
DatabaseOption = Annotated[str, typer.Option("--database-url", help="read a supervisor's database instead (read-only)")]
JobOption = Annotated[str, typer.Option("--job", help="only this job")]

_SHORT = textwrap.TextWrapper(width=74, break_long_words=False, break_on_hyphens=False)  # of 80 columns


def connect(supervisor: str, token_file: str, state_dir: str, job: str = "") -> ApiClient:
    """A client for the supervisor that the options, the environment or this machine name."""
    return connect_live(os.environ, url=supervisor, token_file=token_file, state_dir=state_dir, job=job)


def look(supervisor: str, token_file: str, state_dir: str, *, job: str = "", database_url: str = "") -> ApiClient:
    """As `connect`, to look only: also at what a supervisor left that has ended."""
    return look_at(
        os.environ,
        url=supervisor,
        token_file=token_file,
        state_dir=state_dir,
        job=job,
        database_url=database_url,
    )


def examples(*lines: str) -> str:
    """The end of a command's help: a line for each, as a shell takes it also where it is long."""
    return "\n".join(("Examples:", *(" \\\n    ".join(_SHORT.wrap(line)) for line in lines)))


# --- sources ---------------------------------------------------------------------------------------------------------


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
        known = [folder for folder in live if has_state(folder) and any(run.job == job for run in runs_in(folder))]
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
