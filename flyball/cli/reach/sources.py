"""Choose a supervisor and connect to it, or read what one left behind; and find a job there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.local_runs import (
    UNREADABLE,
    LocalRun,
    find_run,
    find_runs,
    has_state,
    known_names,
    runs_in,
)
from flyball.cli.reach.places import DATABASE, find_supervisor, live_folders, live_record, supervisor_dir
from flyball.cli.show.output import announce
from flyball.contracts.errors import NotFound, UsageError


class SupervisorChoice(NamedTuple):
    """The supervisor that a command talks to, by its options. Empty fields: from the environment or this machine."""

    url: str = ""
    token_file: str = ""
    state_dir: str = ""
    database_url: str = ""

    def places(self) -> dict[str, str]:
        """The options of `find_supervisor`."""
        return {"url": self.url, "token_file": self.token_file, "state_dir": self.state_dir}

    def connect(self, job: str = "") -> ApiClient:
        """Connect to the chosen supervisor, else to the one running here (with `job`: the one that knows that job).

        Raises NotFound, UsageError if several run and none is chosen, Unauthorized.
        """
        places = self.places()
        if not (self.url or self.state_dir or os.environ.get("FLYBALL_SUPERVISOR")):
            places["state_dir"] = str(_running_folder(job) or "")
        try:
            found = find_supervisor(os.environ, **places)
        except NotFound:
            if not self.url and (run := self._elsewhere(job)) is not None:
                raise NotFound(
                    f"The supervisor of job {job} runs on {run.elsewhere}, and cannot be reached from this machine.",
                    hint=f"run this command on {run.elsewhere}",
                ) from None
            raise
        return ApiClient(found.url, found.token)

    def _elsewhere(self, job: str) -> LocalRun | None:
        runs = find_runs(os.environ, state_dir=self.state_dir) if job else ()
        return next((run for run in runs if run.job == job and run.elsewhere), None)

    def open_read_only(self, job: str = "") -> ApiClient:
        """Like `connect`, but falls back to the state that a finished run (with `job`: of that job) left here.

        Raises NotFound, UsageError if several run and none is chosen, Unauthorized, StateVersionMismatch.
        """
        if self.database_url:
            return LeftState(self.database_url)
        has_address = bool(self.url or os.environ.get("FLYBALL_SUPERVISOR"))
        if self.state_dir and not has_address:
            folder = Path(self.state_dir)
            is_live = any(live_record(candidate) for candidate in (folder, folder / "supervisor"))
        else:
            is_live = has_address or _running_folder(job) is not None
        if is_live:
            return self.connect(job)
        if not self.state_dir and (configured := os.environ.get("FLYBALL_DATABASE_URL")):
            return LeftState(configured)
        run = _finished_run(job, self.state_dir)
        url = f"sqlite:///{run.supervisor_dir.resolve() / DATABASE}"
        return LeftState(url, folder=None if run.elsewhere else run.folder)


def get_job(client: ApiClient, name: str) -> dict[str, Any]:
    """Fetch a job. Raises NotFound with a hint that lists similar or known names."""
    try:
        found: dict[str, Any] = client.get(f"/v1/jobs/{name}")
    except NotFound:
        known = [str(job["job"]) for job in reversed(client.items("/v1/jobs"))]
        raise NotFound(f"{client.url} knows no job {name}.", hint=known_names(name, known)) from None
    return found


def _running_folder(job: str) -> Path | None:
    """The folder of the only supervisor that runs here or, with `job`, of one that knows the job."""
    live = live_folders(os.environ)
    if job:
        up = supervisor_dir(os.environ)
        known = [folder for folder in live if has_state(folder) and any(run.job == job for run in runs_in(folder))]
        runs_first = sorted(known, key=lambda folder: folder == up)
        # If the database of `flyball up` is elsewhere, only that supervisor can say which jobs it knows.
        return next(iter(runs_first or [folder for folder in live if folder == up and not has_state(up)]), None)
    if len(live) > 1:
        jobs = {folder: [run.job for run in runs_in(folder)] if has_state(folder) else [] for folder in live}
        names = sorted({name for found in jobs.values() for name in found})
        raise UsageError(
            "Several supervisors run on this machine: "
            + ", ".join(f"{', '.join(found) or 'no job'} (in {folder})" for folder, found in jobs.items())
            + ".",
            hint="choose one with " + " or ".join([*(f"--job {name}" for name in names), "--state-dir DIR"]),
        )
    return live[0] if live else None


def _finished_run(job: str, state_dir: str) -> LocalRun:
    """The newest run (with `job`: of that job) whose supervisor has ended."""
    if job:
        return find_run(os.environ, job, state_dir=state_dir)
    runs = [run for run in find_runs(os.environ, state_dir=state_dir) if run.state != UNREADABLE]
    if not runs:
        where = f"in {state_dir}" if state_dir else "on this machine"
        raise NotFound(
            f"No supervisor runs {where}, and no finished run left its state there.",
            hint="start one with `flyball run` or `flyball up`, or choose one: --supervisor URL, --state-dir DIR, or "
            "--database-url URL",
        )
    if len(runs) > 1 and not state_dir:
        announce(f"no supervisor runs here; showing the newest finished run, {runs[0].job} (--job NAME shows another)")
    return runs[0]
