"""`flyball status`: jobs, hosts and open incidents."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flyball.cli.act.orders import order_rows
from flyball.cli.look.hosts_table import print_conditions, print_hosts, print_transports
from flyball.cli.look.jobs_table import JOB_COLUMNS, hosts_note, job_row, known, outcome, save_note
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.options import JobOption, command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice, get_job
from flyball.cli.show.output import Format, OutputOption, print_table, printable, printed
from flyball.cli.show.times import clock
from flyball.contracts.clock import SystemClock

COMMAND = command_help(
    "Show jobs, hosts, incidents and the newest decisions. Without a running supervisor, shows the state that the "
    "newest run left behind.",
    "flyball status",
    "flyball status --job llama -o json",
    "flyball status --hosts",
    "flyball status -o wide",
)

DECISIONS_SHOWN = 10
MAX_OPEN_JOBS = 10_000
LimitOption = Annotated[
    int, typer.Option("--limit", min=1, help="how many of the newest jobs, incidents and decisions to show")
]


@with_supervisor(without=())
def command(
    *,
    job: JobOption = "",
    all_hosts: Annotated[
        bool,
        typer.Option(
            "--hosts", help="show every host, with its address and failure domain; -o wide adds what carries shards"
        ),
    ] = False,
    also_left: Annotated[bool, typer.Option("--all", help="include hosts that have left the cluster")] = False,
    choice: SupervisorChoice,
    limit: LimitOption = 50,
    output: OutputOption = Format.TABLE,
) -> None:
    """Read-only."""
    with choice.open_read_only(job) as client:
        jobs = [get_job(client, job)] if job else _jobs(client, limit)
        hosts = client.everything("/v1/hosts", all="true" if also_left else None)
        incidents = client.newest("/v1/incidents", limit, job=job or None)
        decisions = client.newest("/v1/decisions", limit, job=job or None)
        orders = client.everything("/v1/orders")
        ended_at = client.ended_at if isinstance(client, LeftState) else None
    if printed(
        {"jobs": jobs, "hosts": hosts, "incidents": incidents, "decisions": decisions, "orders": orders}, output
    ):
        return
    now, wide = SystemClock().wall_s(), output is Format.WIDE
    job_column = () if len(jobs) == 1 else ("job",)
    print_table("Jobs", JOB_COLUMNS, (job_row(found, now) for found in jobs))
    for found in jobs:
        for note in filter(None, (outcome(found, now), hosts_note(found, wide=wide), save_note(found))):
            typer.echo(printable(f"{found['job']}: {note}"))
    print_hosts(hosts, now, everything=all_hosts or wide, ended_at=ended_at)
    print_conditions(hosts, now, everything=all_hosts or wide)
    if wide:
        print_transports(hosts)
    print_table(
        "Incidents",
        ("incident", "at", *job_column, "cause", "state", "host", "lost", "what happened"),
        (
            [i["incident_id"], clock(i.get("opened_at"), now)]
            + [i.get(k) for k in (*job_column, "cause", "state", "host_id")]
            + [known(i.get("lost_steps")), i.get("message")]
            for i in incidents
        ),
    )
    if rows := order_rows(orders, now):
        print_table("Operators' orders", ("order", "target", "until", "state", "reason"), rows)
    newest = sorted(decisions, key=lambda d: float(d["at"]))[-DECISIONS_SHOWN:]
    print_table(
        "Newest decisions (flyball explain DECISION)",
        ("decision", "at", *job_column, "kind", "reason"),
        ([d["decision_id"], clock(d["at"], now), *(d.get(k) for k in (*job_column, "kind", "reason"))] for d in newest),
    )


def _jobs(client: ApiClient, limit: int) -> list[dict[str, Any]]:
    """The newest jobs, and all that have not ended, however old."""
    found = [*client.newest("/v1/jobs", MAX_OPEN_JOBS, open="true"), *client.newest("/v1/jobs", limit)]
    return sorted({j["job"]: j for j in found}.values(), key=lambda j: (float(j["submitted_at"]), str(j["job"])))
