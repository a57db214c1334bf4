"""`flyball stop JOB`: stop a job in order, wherever it was started."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.places import is_running
from flyball.cli.reach.sources import SupervisorChoice, get_job
from flyball.cli.show.output import Format, OutputOption, announce, print_fields, printed
from flyball.cli.show.times import ago, clock, lasted
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import ActionState
from flyball.contracts.errors import Conflict, FlyballError, NotFound, Unreachable
from flyball.contracts.identity import check_name

LOOK_INTERVAL_S = 0.25
PROGRESS_INTERVAL_S = 5.0
AWAY_LIMIT_S = 30.0  # give up when the supervisor is out of reach for longer

COMMAND = command_help(
    "Stop a job and wait until it has ended. Its ranks save first. Its `flyball run` ends too, wherever it runs.",
    "flyball stop llama",
    "flyball stop llama --no-wait",
    "flyball stop llama --within 600 -o json",
)


@with_supervisor()
def command(
    *,
    job: Annotated[str, typer.Argument(help="the job's name, as `flyball ls` and `flyball status` show it")],
    wait: Annotated[bool, typer.Option(help="wait until the job has ended; --no-wait only sends the request")] = True,
    within: Annotated[
        float,
        typer.Option(min=0.1, max=86_400.0, metavar="SECONDS", help="wait at most this long; the job goes on stopping"),
    ] = 300.0,
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 once the job has ended, even if it already had; 10 if that takes too long or nobody supervises it."""
    name = check_name("The job", job)
    with choice.open_read_only(name) as source:
        found = get_job(source, name)
        has_no_supervisor = isinstance(source, LeftState) and source.ended_at is not None
        where = source.url
    if found.get("ended_at") or (has_no_supervisor and _has_ended_with_its_run(Path(where))):
        announce(f"job {name} has already ended")
    elif has_no_supervisor:
        raise Unreachable(
            f"Job {name} has no supervisor that could stop it: it {found['message']}.",
            hint=f"if its workers still train on hosts that run `flyball host`, start the supervisor again "
            f"(flyball up --state-dir {where}), then stop the job",
        )
    else:
        found = _stop(name, choice, within_s=within if wait else 0.0)
    if printed(found, output):
        return
    now = SystemClock().wall_s()
    began, ended = found.get("submitted_at"), found.get("ended_at")
    print_fields(
        {
            "job": name,
            "state": found["state"] if ended or has_no_supervisor else _asked_to_stop(JobState(found["state"])),
            "ended": f"{clock(ended, now)} UTC ({ago(ended, now)})" if ended else None,
            "took": lasted(ended - began) if began and ended else None,
            "newest step": None if found["newest_step"] < 0 else found["newest_step"],
            "message": found["message"],
        }
    )


def _asked_to_stop(state: JobState) -> str:
    return state.value if state.ending else f"{state.value}, asked to stop"


def _has_ended_with_its_run(folder: Path) -> bool:
    """Whether the folder is of a `flyball run` whose own host daemon, and so all its workers, have ended."""
    return (folder / "host").is_dir() and not is_running(folder / "host" / "daemon.pid")


def _stop(name: str, choice: SupervisorChoice, *, within_s: float) -> dict[str, Any]:
    """Stop the job and return it once it has ended, or at once if `within_s` is 0. Raises Unreachable."""
    with choice.connect(name) as client:
        found: dict[str, Any] = client.post(f"/v1/jobs/{name}/stop")
        if not within_s:
            return found
        announce(f"stopping job {name} (Ctrl-C only ends this wait)")
        return _await_end(client, name, choice, within_s)


def _await_end(client: ApiClient, name: str, choice: SupervisorChoice, within_s: float) -> dict[str, Any]:
    began_s = announced_s = answered_s = time.monotonic()
    announced = ""
    while True:
        now_s = time.monotonic()
        try:
            found, activity = _poll(client, name)
        except Unreachable:
            # The supervisor of a `flyball run` ends with its job, and leaves its state behind.
            if (left := _left_behind(name, choice)) is not None:
                return left
            if now_s - answered_s > AWAY_LIMIT_S:
                raise
        else:
            answered_s = now_s
            if JobState(found["state"]).ended and not activity:
                return found
            if activity != announced or now_s - announced_s > PROGRESS_INTERVAL_S:
                announce(f"{activity or found['message'] or found['state']} ({lasted(now_s - began_s)})")
                announced, announced_s = activity, now_s
        if now_s - began_s > within_s:
            raise Unreachable(
                f"Job {name} did not end within {within_s:.0f} s. It is still stopping.",
                hint=f"check again with `flyball status --job {name}`, or wait longer with --within",
            )
        time.sleep(LOOK_INTERVAL_S)


def _poll(client: ApiClient, name: str) -> tuple[dict[str, Any], str]:
    """The job, and the action still in progress on it ('' if none)."""
    found: dict[str, Any] = client.get(f"/v1/jobs/{name}")
    decisions = client.items("/v1/decisions", job=name)
    acting = [d for d in decisions if d.get("action_state") and not ActionState(d["action_state"]).ended]
    return found, f"{acting[-1]['kind']}: {acting[-1]['action_phase']}" if acting else ""


def _left_behind(name: str, choice: SupervisorChoice) -> dict[str, Any] | None:
    """The job as its finished supervisor left it; None while that may come back."""
    try:
        with choice.open_read_only(name) as client:
            if not isinstance(client, LeftState):
                return None
            found: dict[str, Any] = client.get(f"/v1/jobs/{name}")
    except (Unreachable, NotFound, Conflict):
        return None
    except FlyballError as error:  # unreadable, for instance written by another release; the job was stopped anyway
        announce(error.message)
        return None
    return found
