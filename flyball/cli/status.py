"""`flyball status`: jobs, hosts and open incidents."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.options import JobOption, command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice, get_job
from flyball.cli.show.output import Format, OutputOption, print_json, print_table, printable
from flyball.cli.show.times import ago, clock, lasted, rough, short
from flyball.contracts.clock import SystemClock

COMMAND = command_help(
    "Show jobs, hosts, incidents and the newest decisions. Without a running supervisor, shows the state that the "
    "newest run left behind.",
    "flyball status",
    "flyball status --job llama -o json",
    "flyball status --hosts",
)

DECISIONS_SHOWN = 10
HOSTS_SHOWN = 8  # with more hosts, show only the unhealthy ones, unless --hosts asks for all
MAX_UNHEALTHY_SHOWN = 40
MAX_OPEN_JOBS = 10_000
HEALTHY = ("healthy", "spare")
LimitOption = Annotated[
    int, typer.Option("--limit", min=1, help="how many of the newest jobs, incidents and decisions to show")
]


@with_supervisor(without=())
def command(
    *,
    job: JobOption = "",
    all_hosts: Annotated[
        bool, typer.Option("--hosts", help="show every host, with its address and failure domain")
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
        ended_at = client.ended_at if isinstance(client, LeftState) else None
    if output is Format.JSON:
        print_json({"jobs": jobs, "hosts": hosts, "incidents": incidents, "decisions": decisions})
        return
    now = SystemClock().wall_s()
    job_column = () if len(jobs) == 1 else ("job",)
    print_table("Jobs", _JOB_COLUMNS, (_job_row(found, now) for found in jobs))
    for found in jobs:
        for note in filter(None, (_outcome(found, now), _save_note(found))):
            typer.echo(printable(f"{found['job']}: {note}"))
    _print_hosts(hosts, now, everything=all_hosts, ended_at=ended_at)
    print_table(
        "Incidents",
        ("incident", "at", *job_column, "cause", "state", "host", "lost", "what happened"),
        (
            [i["incident_id"], clock(i.get("opened_at"), now)]
            + [i.get(k) for k in (*job_column, "cause", "state", "host_id")]
            + [_known(i.get("lost_steps")), i.get("message")]
            for i in incidents
        ),
    )
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


_JOB_COLUMNS = ("job", "state", "for", "started", "step", "loss", "last step", "a step", "restarts")


def _loss(job: dict[str, Any]) -> str | None:
    """The loss, with its step if that is not the newest: a loss on a device is reported one step later."""
    loss = job.get("loss")
    if loss is None:
        return None
    value = f"{float(loss['value']):.5g}"
    return value if loss["step"] == job.get("newest_step") else f"{value} (step {loss['step']})"


def _restarts(job: dict[str, Any]) -> str:
    """All restarts, and how much of the --max-restarts budget is used up since the job last made progress."""
    count, allowed = job.get("restart_count", 0), (job.get("spec") or {}).get("max_restarts")
    return (
        f"{count} ({job.get('restarts_used', count)} of {allowed} used)"
        if count and allowed is not None
        else str(count)
    )


def _job_row(job: dict[str, Any], now: float) -> list[object]:
    since = job.get("since")
    return [
        job["job"],
        job["state"],
        rough(now - since if since else None),
        clock(job.get("started_at") or job["submitted_at"], now),
        _known(job.get("newest_step")),
        _loss(job),
        ago(job.get("last_step_at"), now),
        short(job.get("step_s")),
        _restarts(job),
    ]


def _outcome(job: dict[str, Any], now: float) -> str:
    """The job's end, or its state's message, for which the table has no room."""
    message = str(job.get("message") or "")
    hosts = len({rank["host_id"] for rank in job.get("ranks") or ()})
    if ended_at := job.get("ended_at"):
        took = lasted(ended_at - job["submitted_at"])
        return f"ended at {clock(ended_at, now)} UTC, after {took}" + (f": {message}" if message else "")
    return f"{job.get('world_size', '?')} ranks on {hosts} hosts; {message}" if hosts > HOSTS_SHOWN else message


def _save_note(job: dict[str, Any]) -> str:
    """Explains why the job saves less often than configured, if it does."""
    interval = job.get("save_interval")
    if job.get("ended_at") or not interval or interval["every_steps"] <= interval["wanted_steps"]:
        return ""
    save, step = short(interval["save_s"]), short(interval["step_s"])
    every, wanted = interval["every_steps"], interval["wanted_steps"]
    return (
        f"saves every {every} steps, not every {wanted}: a save takes {save} until all hosts and peers have it, "
        f"a step {step}"
    )


def _print_hosts(hosts: list[dict[str, Any]], now: float, *, everything: bool, ended_at: float | None) -> None:
    when = f", as of the supervisor's end at {clock(ended_at, now)} UTC" if ended_at else ""
    if everything:
        columns = ("host", "state", "for", "job", "last report", "address", "domain", "reason")
        rows = [[*_host_row(h, now), h.get("address"), h.get("failure_domain"), h.get("reason")] for h in hosts]
        print_table(f"Hosts{when}", columns, rows)
        return
    shown = hosts
    title = "Hosts"
    if len(hosts) > HOSTS_SHOWN:
        counts = Counter("left" if host.get("left_at") else str(host.get("state")) for host in hosts)
        title = f"{len(hosts)} hosts: " + ", ".join(f"{n} {state}" for state, n in counts.most_common())
        shown = [host for host in hosts if host.get("state") not in HEALTHY or _drain(host) or host.get("left_at")]
        if not shown:
            typer.echo(f"{title}{when} (--hosts lists them)")
            return
        title += "; not healthy:"
    rows = [[*_host_row(host, now), host.get("reason")] for host in shown[:MAX_UNHEALTHY_SHOWN]]
    print_table(f"{title}{when}", ("host", "state", "for", "job", "last report", "reason"), rows)
    if len(shown) > MAX_UNHEALTHY_SHOWN:
        typer.echo(f"and {len(shown) - MAX_UNHEALTHY_SHOWN} more (--hosts lists all)")


def _host_row(host: dict[str, Any], now: float) -> list[object]:
    drain = _drain(host)
    left_at = host.get("left_at")
    state = f"{host.get('state')}, drain {drain}" if drain else "left" if left_at else host.get("state")
    since = left_at or host.get("since")
    return [
        host.get("host_id"),
        state,
        rough(now - since if since else None),
        host.get("job"),
        ago(host.get("last_report_at"), now),
    ]


def _drain(host: dict[str, Any]) -> str:
    state = str((host.get("drain") or {}).get("state") or "")
    return "" if state == "drained" else state


def _known(value: object) -> object:
    """None for -1, which stands for unknown in steps and counts."""
    return None if value == -1 else value
