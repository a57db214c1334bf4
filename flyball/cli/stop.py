"""`flyball stop JOB`: end a job in order, wherever it was started."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.job_names import get_job
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.options import (
    StateDirOption,
    SupervisorOption,
    TokenFileOption,
    connect,
    examples,
    look,
)
from flyball.cli.reach.places import is_running
from flyball.cli.show.output import Format, OutputOption, print_fields, print_json, say
from flyball.cli.show.times import ago, clock, lasted
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import ActionState
from flyball.contracts.errors import Conflict, FlyballError, NotFound, Unreachable
from flyball.contracts.identity import check_name

LOOK_INTERVAL_S = 0.25
SAID_EVERY_S = 5.0
AWAY_LIMIT_S = 30.0  # how long the supervisor may be out of reach meanwhile

COMMAND: dict[str, Any] = {
    "help": "Stop a job in order, and wait until it has ended. Its command, wherever that runs, ends too.",
    "epilog": examples("flyball stop llama", "flyball stop llama --no-wait", "flyball stop llama --within 600 -o json"),
}


def command(
    *,
    job: Annotated[str, typer.Argument(help="its name, as `flyball ls` and `flyball status` show it")],
    wait: Annotated[bool, typer.Option(help="wait until it has ended; --no-wait: only ask for it")] = True,
    within: Annotated[
        float, typer.Option(min=0.1, max=86_400.0, metavar="SECONDS", help="wait at most so long; it goes on stopping")
    ] = 300.0,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 when it has ended, also if it had before; 10 when that takes too long or nobody supervises it."""
    name = check_name("The job", job)
    with look(supervisor, token_file, state_dir, job=name) as seen:
        found = get_job(seen, name)
        is_left = isinstance(seen, LeftState) and seen.ended_at is not None
        where = seen.url
    if found.get("ended_at") or (is_left and _has_run_out(Path(where))):
        say(f"job {name} had ended already")
    elif is_left:
        raise Unreachable(
            f"Nobody can stop the job {name}: it {found['message']}.",
            hint=f"a job of `flyball run` ended with it; if workers of `flyball host` train on, start the supervisor "
            f"again (flyball up --state-dir {where}), then stop the job",
        )
    else:
        found = _stop(name, _Place(supervisor, token_file, state_dir), within_s=within if wait else 0.0)
    if output is Format.JSON:
        print_json(found)
        return
    now = SystemClock().wall_s()
    began, ended = found.get("submitted_at"), found.get("ended_at")
    print_fields(
        {
            "job": name,
            "state": found["state"] if ended or is_left else f"{found['state']}, asked to stop",
            "ended": f"{clock(ended, now)} UTC ({ago(ended, now)})" if ended else None,
            "took": lasted(ended - began) if began and ended else None,
            "newest step": None if found["newest_step"] < 0 else found["newest_step"],
            "message": found["message"],
        }
    )


class _Place(NamedTuple):
    supervisor: str
    token_file: str
    state_dir: str


def _has_run_out(folder: Path) -> bool:
    """Whether it is a run's whose own host daemon ended with it, and with that its workers."""
    return (folder / "host").is_dir() and not is_running(folder / "host" / "daemon.pid")


def _stop(name: str, place: _Place, *, within_s: float) -> dict[str, Any]:
    """The job when it has ended, or as it is at once with `within_s` 0. Raises Unreachable."""
    with connect(*place, name) as client:
        found: dict[str, Any] = client.post(f"/v1/jobs/{name}/stop")
        if not within_s:
            return found
        say(f"stopping job {name} (Ctrl-C: leaves it to that)")
        return _await_end(client, name, place, within_s)


def _await_end(client: ApiClient, name: str, place: _Place, within_s: float) -> dict[str, Any]:
    began_s = said_s = answered_s = time.monotonic()
    told = ""
    while True:
        now_s = time.monotonic()
        try:
            found, doing = _look(client, name)
        except Unreachable:
            # The supervisor of a `flyball run` ends with its job, and leaves its state.
            if (left := _left(name, place)) is not None:
                return left
            if now_s - answered_s > AWAY_LIMIT_S:
                raise
        else:
            answered_s = now_s
            if JobState(found["state"]).ended and not doing:
                return found
            if doing != told or now_s - said_s > SAID_EVERY_S:
                say(f"{doing or found['message'] or found['state']} ({lasted(now_s - began_s)})")
                told, said_s = doing, now_s
        if now_s - began_s > within_s:
            raise Unreachable(
                f"The job {name} has not ended within {within_s:.0f} s; it goes on stopping.",
                hint=f"look again with `flyball status --job {name}`, or wait longer with --within",
            )
        time.sleep(LOOK_INTERVAL_S)


def _look(client: ApiClient, name: str) -> tuple[dict[str, Any], str]:
    """The job, and what is still being carried out of what was decided about it."""
    found: dict[str, Any] = client.get(f"/v1/jobs/{name}")
    decisions = client.items("/v1/decisions", job=name)
    acting = [d for d in decisions if d.get("action_state") and not ActionState(d["action_state"]).ended]
    return found, f"{acting[-1]['kind']}: {acting[-1]['action_phase']}" if acting else ""


def _left(name: str, place: _Place) -> dict[str, Any] | None:
    """The job in the state that its supervisor left; None while it may come back."""
    try:
        with look(*place, job=name) as client:
            if not isinstance(client, LeftState):
                return None
            found: dict[str, Any] = client.get(f"/v1/jobs/{name}")
    except (Unreachable, NotFound, Conflict):
        return None
    except FlyballError as error:  # it is being written by another release, for instance: the job was stopped anyway
        say(error.message)
        return None
    return found
