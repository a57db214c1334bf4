"""`flyball status`: jobs, hosts and open incidents."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flyball.cli.client import ApiClient
from flyball.cli.options import JobOption, StateDirOption, SupervisorOption, TokenFileOption, connect, examples
from flyball.cli.output import Format, OutputOption, print_json, print_table

COMMAND: dict[str, Any] = {
    "help": "Show jobs, hosts, incidents and the newest decisions.",
    "epilog": examples("flyball status", "flyball status --job llama -o json"),
}

DECISIONS_SHOWN = 10
MAX_OPEN_JOBS = 10_000
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="newest jobs, incidents and decisions to ask for")]


def command(
    *,
    job: JobOption = "",
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    limit: LimitOption = 50,
    output: OutputOption = Format.TABLE,
) -> None:
    """One look; nothing is changed."""
    with connect(supervisor, token_file, state_dir) as client:
        jobs = [client.get(f"/v1/jobs/{job}")] if job else _jobs(client, limit)
        hosts = client.everything("/v1/hosts")
        incidents = client.newest("/v1/incidents", limit, job=job or None)
        decisions = client.newest("/v1/decisions", limit, job=job or None)
    if output is Format.JSON:
        print_json({"jobs": jobs, "hosts": hosts, "incidents": incidents, "decisions": decisions})
        return
    print_table("Jobs", ("job", "state", "step", "generation", "restarts", "hosts", "message"), map(_job_row, jobs))
    print_table("Hosts", ("host", "state", "job", "address", "domain", "reason"), map(_host_row, hosts))
    print_table(
        "Incidents",
        ("incident", "job", "cause", "state", "host", "lost steps", "what happened"),
        (
            [i.get(k) for k in ("incident_id", "job", "cause", "state", "host_id")]
            + [_known(i.get("lost_steps")), i.get("message")]
            for i in incidents
        ),
    )
    newest = sorted(decisions, key=lambda d: float(d["at"]))[-DECISIONS_SHOWN:]
    print_table(
        "Newest decisions (flyball explain DECISION)",
        ("decision", "job", "kind", "reason"),
        ([d.get(k) for k in ("decision_id", "job", "kind", "reason")] for d in newest),
    )


def _jobs(client: ApiClient, limit: int) -> list[dict[str, Any]]:
    """The newest, and all that have not ended, however old."""
    found = [*client.newest("/v1/jobs", MAX_OPEN_JOBS, open="true"), *client.newest("/v1/jobs", limit)]
    return sorted({j["job"]: j for j in found}.values(), key=lambda j: (float(j["submitted_at"]), str(j["job"])))


def _job_row(job: dict[str, Any]) -> list[object]:
    hosts = sorted({r["host_id"] for r in job.get("ranks") or ()})
    columns = ("state", "newest_step", "generation", "restart_count")
    return [_name(job), *(_known(job.get(c)) for c in columns), hosts, job.get("message")]


def _name(job: dict[str, Any]) -> object:
    spec = job.get("spec") or {}
    return job.get("job") or spec.get("job")


def _host_row(host: dict[str, Any]) -> list[object]:
    drain = (host.get("drain") or {}).get("state")
    state = f"{host.get('state')}, drain {drain}" if drain and drain != "drained" else host.get("state")
    return [host.get("host_id"), state, *(host.get(k) for k in ("job", "address", "failure_domain", "reason"))]


def _known(value: object) -> object:
    """-1 stands for not known in steps and counts."""
    return None if value == -1 else value
