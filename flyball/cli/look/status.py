"""`flyball status`: one screen about the cluster; with -o wide everything."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flyball.cli.act.orders import order_rows
from flyball.cli.look.hosts_table import print_conditions, print_hosts, print_transports
from flyball.cli.look.jobs_table import JOB_COLUMNS, hosts_note, job_row, known, outcome, save_note
from flyball.cli.look.overview import (
    HOSTS_SHOWN,
    JOBS_SHOWN,
    OPEN_INCIDENTS,
    Overview,
    first_jobs,
    free_hosts,
    screen,
    troubled_hosts,
)
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.options import JobOption, command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice, get_job
from flyball.cli.show.output import Format, OutputOption, print_table, printable, printed, room
from flyball.cli.show.times import clock
from flyball.contracts.clock import SystemClock

COMMAND = command_help(
    "Show on one screen what trains, on which hosts, what is wrong, and what to do next. Without a running supervisor, "
    "shows the state that the newest run left behind.",
    "flyball status",
    "flyball status --job llama -o json",
    "flyball status --hosts",
    "flyball status -o wide",
)

DECISIONS_SHOWN = 10
JOBS_READ = INCIDENTS_READ = 100  # to be counted; of older ones the screen says only that there may be more
MAX_OPEN_JOBS = 10_000
LimitOption = Annotated[
    int, typer.Option("--limit", min=1, help="with -o wide, json or yaml: the newest jobs, incidents and decisions")
]


@with_supervisor(without=())
def command(
    *,
    job: JobOption = "",
    all_hosts: Annotated[
        bool, typer.Option("--hosts", help="also list every host, with its address, failure domain and conditions")
    ] = False,
    also_left: Annotated[bool, typer.Option("--all", help="list hosts, also those that have left the cluster")] = False,
    choice: SupervisorChoice,
    limit: LimitOption = 50,
    output: OutputOption = Format.TABLE,
) -> None:
    """Read-only."""
    now = SystemClock().wall_s()
    with choice.open_read_only(job) as client:
        ended_at = client.ended_at if isinstance(client, LeftState) else None
        if output is Format.TABLE:
            typer.echo(printable("\n".join(screen(_overview(client, job, ended_at), now, room()))))
            if all_hosts or also_left:
                _print_hosts(client.everything("/v1/hosts", all="true" if also_left else None), now, ended_at)
            return
        found = _everything(client, job, limit, also_left=also_left)
    if not printed(found, output):
        _print(found, now, ended_at)


def _overview(client: ApiClient, job: str, ended_at: float | None) -> Overview:
    """What one screen needs, in few requests however large the cluster is."""
    of_job: dict[str, Any] = {"job": job or None}
    open_incidents = client.newest("/v1/incidents", INCIDENTS_READ, state=OPEN_INCIDENTS, **of_job)
    jobs = first_jobs([get_job(client, job)] if job else _jobs(client, JOBS_READ), open_incidents)
    shown = jobs[:JOBS_SHOWN]
    host_map = client.get("/v1/host-map")
    troubled = troubled_hosts(host_map)
    return Overview(
        jobs=shown,
        more_jobs=len(jobs) - len(shown),
        jobs_are_cut=len(jobs) >= JOBS_READ,
        recoverable={}
        if ended_at  # whether memory still has its copies is not known then
        else {one["job"]: client.get(f"/v1/jobs/{one['job']}/recoverability") for one in shown},
        host_states=host_map["states"],
        free_hosts=free_hosts(host_map),
        hosts=[client.get(f"/v1/hosts/{name}") for name in troubled[:HOSTS_SHOWN]],
        troubled=len(troubled),
        open_incidents=open_incidents,
        incidents_are_cut=len(open_incidents) >= INCIDENTS_READ,
        newest_incident=next(iter(client.items("/v1/incidents", limit=1, **of_job)), None),
        decisions=client.items("/v1/decisions", limit=DECISIONS_SHOWN, **of_job),
        orders=client.items("/v1/orders"),
        ended_at=ended_at,
        problem=next(iter(_problems(client).values()), ""),
    )


def _problems(client: ApiClient) -> dict[str, str]:
    """Why nothing is decided: check -> problem. What the database says explains why no controller leads."""
    found = client.problems()
    return {check: found[check] for check in ("database", "leader") if check in found}


def _everything(client: ApiClient, job: str, limit: int, *, also_left: bool) -> dict[str, list[dict[str, Any]]]:
    return {
        "jobs": [get_job(client, job)] if job else _jobs(client, limit),
        "hosts": client.everything("/v1/hosts", all="true" if also_left else None),
        "incidents": client.newest("/v1/incidents", limit, job=job or None),
        "decisions": client.newest("/v1/decisions", limit, job=job or None),
        "orders": client.everything("/v1/orders"),
        "supervisor": [{"check": check, "problem": problem} for check, problem in _problems(client).items()],
    }


def _print(found: dict[str, list[dict[str, Any]]], now: float, ended_at: float | None) -> None:
    """All of it, as -o wide shows it."""
    jobs, decisions = found["jobs"], found["decisions"]
    for one in found["supervisor"]:
        typer.echo(printable(f"Supervisor: decides nothing: {one['problem']}"))
    job_column = () if len(jobs) == 1 else ("job",)
    print_table("Jobs", JOB_COLUMNS, (job_row(one, now) for one in jobs))
    for one in jobs:
        for note in filter(None, (outcome(one, now), hosts_note(one, wide=True), save_note(one))):
            typer.echo(printable(f"{one['job']}: {note}"))
    _print_hosts(found["hosts"], now, ended_at)
    print_transports(found["hosts"])
    print_table(
        "Incidents",
        ("incident", "at", *job_column, "cause", "state", "host", "lost", "what happened"),
        (
            [i["incident_id"], clock(i.get("opened_at"), now)]
            + [i.get(k) for k in (*job_column, "cause", "state", "host_id")]
            + [known(i.get("lost_steps")), i.get("message")]
            for i in found["incidents"]
        ),
    )
    if rows := order_rows(found["orders"], now):
        print_table("Operators' orders", ("order", "target", "until", "state", "reason"), rows)
    newest = sorted(decisions, key=lambda d: float(d["at"]))[-DECISIONS_SHOWN:]
    print_table(
        "Newest decisions (flyball explain DECISION)",
        ("decision", "at", *job_column, "kind", "reason"),
        ([d["decision_id"], clock(d["at"], now), *(d.get(k) for k in (*job_column, "kind", "reason"))] for d in newest),
    )


def _print_hosts(hosts: list[dict[str, Any]], now: float, ended_at: float | None) -> None:
    print_hosts(hosts, now, ended_at=ended_at)
    print_conditions(hosts, now)


def _jobs(client: ApiClient, limit: int) -> list[dict[str, Any]]:
    """The newest jobs, and all that have not ended, however old."""
    found = [*client.newest("/v1/jobs", MAX_OPEN_JOBS, open="true"), *client.newest("/v1/jobs", limit)]
    return sorted({j["job"]: j for j in found}.values(), key=lambda j: (float(j["submitted_at"]), str(j["job"])))
