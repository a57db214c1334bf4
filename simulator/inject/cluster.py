"""What an injector asks a supervisor: where a rank runs, where a host keeps its state, and to note down the fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from flyball.contracts.cluster import JobState
from flyball.contracts.errors import NotFound, Unreachable
from flyball.contracts.events import Event
from simulator.inject.host_files import HostFiles, is_daemon, state_dir_of
from simulator.inject.processes import look_at


class Api(Protocol):
    """The supervisor's HTTP API: plain JSON out, contract types in; raises FlyballError.

    `flyball.cli.reach.client.ApiClient` is one."""

    def get(self, path: str, **params: str | int | None) -> Any: ...  # noqa: ANN401 - JSON

    def post(self, path: str, body: object = None) -> Any: ...  # noqa: ANN401 - JSON


def host_of_rank(api: Api, job: str, rank: int) -> str:
    """The host that a rank of a running job is placed on. Raises NotFound."""
    found = api.get(f"/v1/jobs/{job}")
    if JobState(found["state"]).ended:
        raise NotFound(f"Job {job} has ended ({found['state']}): it has no workers.", hint="name a job that runs")
    hosts = {int(r["rank"]): str(r["host_id"]) for r in found["ranks"]}
    if rank not in hosts:
        ranks = ", ".join(map(str, sorted(hosts))) or "none yet"
        raise NotFound(f"Job {job} has no rank {rank}.", hint=f"ranks that are placed: {ranks}")
    return hosts[rank]


def jobs_on(api: Api, host_id: str) -> list[str]:
    """Running jobs that have ranks on a host."""
    return [
        str(job["job"])
        for job in api.get("/v1/jobs")["items"]
        if not JobState(job["state"]).ended and any(rank["host_id"] == host_id for rank in job["ranks"])
    ]


def files_of(api: Api, host_id: str, state_dir: Path | None = None) -> HostFiles:
    """The state folder of a host: the one that is named, else the one that its daemon on this machine was given.

    Raises NotFound if the supervisor does not know the host, or if its daemon does not run here.
    """
    host = api.get(f"/v1/hosts/{host_id}")
    if state_dir is not None:
        return HostFiles(state_dir)
    pid = int(host["daemon_pid"] or 0)
    daemon = look_at(pid) if pid else None
    folder = state_dir_of(daemon) if daemon is not None and is_daemon(daemon) else None
    if folder is None:
        raise NotFound(
            f"The daemon of host {host_id} (pid {pid}) does not run on this machine.",
            hint="run this command on that host, or name the host's folder with --state-dir",
        )
    return HostFiles(folder)


def note_down(api: Api, events: Sequence[Event]) -> None:
    """Store that a fault was injected. Raises Unreachable that says that it was, if the supervisor did not take it."""
    try:
        api.post("/v1/events", list(events))
    except Unreachable as error:
        raise Unreachable(
            f"The fault was injected, but the supervisor could not note it down: {error.message}", hint=error.hint
        ) from error
