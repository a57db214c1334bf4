"""Real faults on a live stack: a worker killed or frozen, a host lost, a preemption notice.

Only jobs that were started with `--injectable` are touched. Every fault finds its target through the supervisor's API
and the host's state folder, verifies the processes, takes the time, acts, and has the supervisor record it. The
timestamp precedes the act, so times counted from it include all of the damage.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flyball.contracts.clock import Clock
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import ConfigurationError, Forbidden, NotFound, StorageFull, Unreachable, UsageError
from flyball.contracts.events import Event, EventKind
from flyball.contracts.identity import check_name
from flyball.contracts.reports.conditions import ConditionRequest, Severity
from flyball.state_folder import clear_errors, write_private
from simulator.inject.host_files import (
    CONDITIONS_FOLDER,
    PREEMPTION_NOTICE,
    HostFiles,
    RecordedWorker,
    host_id_of,
    is_daemon,
    segments,
    state_dir_of,
)
from simulator.inject.processes import LiveProcess, look_at, pids_of, send, wait_ended

HOST_DOWN_ROUNDS = 5  # a dying spawner may still have forked a worker
HOST_DOWN_TIMEOUT_S = 5.0


class Injection(msgspec.Struct, frozen=True):
    """An injected fault and its time: `at` is wall clock, taken before the first act."""

    fault: str
    at: float
    host_id: str
    target: str  # in words
    jobs: tuple[str, ...]  # affected jobs
    generation: int = -1
    rank: int = -1
    pids: tuple[int, ...] = ()  # that received a signal
    removed_segments: int = 0

    def events(self) -> list[Event]:
        """The record for the event log, one event per job."""
        return [
            Event(
                at=self.at,
                kind=EventKind.FAULT_INJECTED,
                job=job,
                generation=self.generation,
                rank=self.rank,
                host_id=self.host_id,
                data={"fault": self.fault, "target": self.target},
            )
            for job in self.jobs or ("",)
        ]


def kill(api: Api, *, job: str, rank: int, clock: Clock, state_dir: Path | None = None) -> Injection:
    """Send SIGKILL to the process of one rank. Raises NotFound if the rank is not running."""
    return _signal_worker(api, "kill", signal.SIGKILL, job=job, rank=rank, clock=clock, state_dir=state_dir)


def hang(api: Api, *, job: str, rank: int, clock: Clock, state_dir: Path | None = None) -> Injection:
    """Send SIGSTOP to the process of one rank: it lives but does nothing. Raises NotFound if it is not running."""
    return _signal_worker(api, "hang", signal.SIGSTOP, job=job, rank=rank, clock=clock, state_dir=state_dir)


def host_down(api: Api, *, host_id: str, clock: Clock, state_dir: Path | None = None) -> Injection:
    """Simulate the loss of a machine.

    Kills daemon, engine, spawners and workers, and removes the host's shared memory and state folder, which would
    otherwise survive on one machine. Raises ConfigurationError if a process does not die.
    """
    files = files_of(api, host_id, state_dir)
    jobs = injectable_on(api, host_id)
    prefix = files.segment_prefix()
    at = clock.wall_s()
    killed = kill_all(files, clock)
    injection = Injection(
        fault="host-down",
        at=at,
        host_id=host_id,
        target=f"host {host_id}",
        jobs=jobs,
        pids=tuple(killed),
        removed_segments=remove_host(files, prefix),
    )
    note_down(api, injection.events())
    return injection


def preempt(
    api: Api, *, host_id: str, deadline_s: float = 30.0, clock: Clock, state_dir: Path | None = None
) -> Injection:
    """Announce that the host will be taken away in `deadline_s`, as a cloud would. Nothing is taken away."""
    if not deadline_s > 0:
        raise UsageError(f"A notice of {deadline_s} s is not valid.", hint="give a number of seconds greater than 0")
    files = files_of(api, host_id, state_dir)
    jobs = injectable_on(api, host_id)
    at = clock.wall_s()
    write_notice(files.root / PREEMPTION_NOTICE, deadline_s)
    injection = Injection(
        fault="preempt", at=at, host_id=host_id, target=f"host {host_id}, {deadline_s:g} s of notice", jobs=jobs
    )
    note_down(api, injection.events())
    return injection


def condition(
    api: Api,
    *,
    host_id: str,
    kind: str,
    severity: Severity = Severity.CRITICAL,
    ends: bool = False,
    clock: Clock,
    state_dir: Path | None = None,
) -> Injection:
    """Report that something is wrong with the host, in a file in its state folder as a monitor would; `ends`: take the
    report back, whoever trains there. The hardware is left alone."""
    files = files_of(api, host_id, state_dir)
    jobs = tuple(jobs_on(api, host_id)) if ends else injectable_on(api, host_id)
    at = clock.wall_s()
    path = files.root / CONDITIONS_FOLDER / f"injected-{check_name('The kind', kind)}.json"
    said = ConditionRequest(kind, severity, f"flyball inject reported {kind}.")
    with clear_errors(path):
        if ends:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(path, msgspec.json.encode(said), durable=False)
    what = f"{kind} is over" if ends else f"{severity.value} {kind}"
    injection = Injection(fault="condition", at=at, host_id=host_id, target=f"host {host_id}, {what}", jobs=jobs)
    note_down(api, injection.events())
    return injection


def _signal_worker(
    api: Api, fault: str, number: signal.Signals, *, job: str, rank: int, clock: Clock, state_dir: Path | None
) -> Injection:
    host_id = host_of_rank(api, job, rank)
    check_injectable([api.get(f"/v1/jobs/{job}")])
    worker, process = running_worker(files_of(api, host_id, state_dir), job, rank, host_id)
    at = clock.wall_s()
    if not send(process, number):
        raise _not_running(job, rank, host_id)
    injection = Injection(
        fault=fault,
        at=at,
        host_id=host_id,
        target=f"rank {rank} on {host_id}",
        jobs=(job,),
        generation=worker.generation,
        rank=rank,
        pids=(process.pid,),
    )
    note_down(api, injection.events())
    return injection


def running_worker(files: HostFiles, job: str, rank: int, host_id: str) -> tuple[RecordedWorker, LiveProcess]:
    """A rank's newest process. Raises NotFound if it does not run."""
    newest = next((w for w in files.workers() if (w.job, w.rank) == (job, rank)), None)
    process = files.process_of(newest) if newest is not None else None
    if newest is None or process is None:
        raise _not_running(job, rank, host_id)
    return newest, process


def _not_running(job: str, rank: int, host_id: str) -> NotFound:
    return NotFound(
        f"Rank {rank} of job {job} does not run on {host_id} at the moment: nothing was done.",
        hint="wait until the job has recovered (flyball status), then inject again",
    )


def kill_all(files: HostFiles, clock: Clock) -> list[int]:
    """Kill everything that runs on the host, the daemon first, until nothing is left."""
    killed: list[int] = []
    for _ in range(HOST_DOWN_ROUNDS):
        running = files.processes()
        if not running:
            return killed
        killed += [process.pid for process in running if send(process, signal.SIGKILL)]
        wait_ended(running, timeout_s=HOST_DOWN_TIMEOUT_S, clock=clock)
    left = ", ".join(str(process.pid) for process in files.processes())
    if left:
        raise ConfigurationError(
            f"Processes of the host are still there after SIGKILL: {left}.", hint="see what they wait for in the kernel"
        )
    return killed


def remove_host(files: HostFiles, prefix: Path) -> int:
    """Remove the host's shared memory and state folder; returns the number of shared-memory files."""
    found = segments(prefix)
    for path in found:
        path.unlink(missing_ok=True)
    files.remove()
    return len(found)


def write_notice(path: Path, deadline_s: float, source: str = "flyball inject") -> None:
    notice = msgspec.json.encode({"deadline_s": deadline_s, "source": source})
    try:
        write_private(path, notice, durable=False)
    except OSError as error:
        raise StorageFull(
            f"The notice could not be written in {path.parent}: {error.strerror}.", hint="free space on that disk"
        ) from error


# --- what the supervisor is asked ------------------------------------------------------------------------------------


class Api(Protocol):
    """The supervisor's HTTP API: plain JSON out, contract types in; raises FlyballError.

    `flyball.cli.reach.client.ApiClient` implements it.
    """

    def get(self, path: str, **params: str | int | None) -> Any: ...  # noqa: ANN401 - JSON

    def post(self, path: str, body: object = None) -> Any: ...  # noqa: ANN401 - JSON


def host_of_rank(api: Api, job: str, rank: int) -> str:
    """The host on which a rank of a running job is placed. Raises NotFound."""
    found = api.get(f"/v1/jobs/{job}")
    if JobState(found["state"]).ended:
        raise NotFound(f"Job {job} has ended ({found['state']}): it has no workers.", hint="name a job that runs")
    hosts = {int(r["rank"]): str(r["host_id"]) for r in found["ranks"]}
    if rank not in hosts:
        ranks = ", ".join(map(str, sorted(hosts))) or "none yet"
        raise NotFound(f"Job {job} has no rank {rank}.", hint=f"ranks that are placed: {ranks}")
    return hosts[rank]


def jobs_on(api: Api, host_id: str) -> list[str]:
    """Running jobs with ranks on a host."""
    job = str(api.get(f"/v1/hosts/{host_id}")["job"])
    return [job] if job else []


def injectable_on(api: Api, host_id: str) -> tuple[str, ...]:
    """The same. Raises Forbidden if one of them may not be broken."""
    return check_injectable([api.get(f"/v1/jobs/{name}") for name in jobs_on(api, host_id)])


def check_injectable(jobs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of those that have not ended. Raises Forbidden if one was not started with `--injectable`."""
    running = [job for job in jobs if not JobState(job["state"]).ended]
    for job in running:
        if not job["spec"].get("injectable", False):
            raise Forbidden(
                f"Job {job['job']} may not be broken on purpose: nothing was done.",
                hint="start it with `flyball run --injectable`",
            )
    return tuple(sorted(str(job["job"]) for job in running))


def open_jobs(api: Api) -> list[dict[str, Any]]:
    """All jobs that have not ended, from as many pages as it takes."""
    found: list[dict[str, Any]] = []
    before: str | None = None
    while True:
        page = api.get("/v1/jobs", open="true", before=before)
        found += page["items"]
        before = page.get("next_before")
        if not before:
            return found


def files_of(api: Api, host_id: str, state_dir: Path | None = None) -> HostFiles:
    """Open a host's state folder: `state_dir`, or else the one that its daemon on this machine uses.

    Raises NotFound if the supervisor does not know the host, if its daemon does not run here, or if `state_dir` is
    another host's.
    """
    host = api.get(f"/v1/hosts/{host_id}")
    pid = int(host["daemon_pid"] or 0)
    if state_dir is not None:
        files = HostFiles(state_dir)
        _check_is_of(files, host_id, pid, {str(host["job"])})
        return files
    daemon = look_at(pid) if pid else None
    is_its = daemon is not None and is_daemon(daemon) and host_id_of(daemon) in ("", host_id)
    folder = state_dir_of(daemon) if daemon is not None and is_its else None
    if folder is None:
        raise NotFound(
            f"The daemon of host {host_id} (pid {pid}) does not run on this machine.",
            hint="run this command on that host, or name the host's folder with --state-dir",
        )
    return HostFiles(folder)


def _check_is_of(files: HostFiles, host_id: str, daemon_pid: int, jobs: set[str]) -> None:
    """Raises NotFound if the folder is not that host's. Its daemon tells; without one, the jobs of its workers do."""
    daemon = files.daemon()
    if daemon is not None:
        is_its = host_id_of(daemon) in ("", host_id) and daemon_pid in pids_of(daemon)
        why = f"its daemon has the pid {daemon.pid} and the host id {host_id_of(daemon) or 'of its machine'}"
    else:
        running = {worker.job for worker in files.workers() if files.process_of(worker) is not None}
        is_its, why = running <= jobs, f"ranks of {', '.join(sorted(running))} run in it"
    if not is_its:
        raise NotFound(
            f"{files.root} is not the folder of host {host_id} (pid {daemon_pid}): {why}. Nothing was done.",
            hint="give --state-dir of that host, and --supervisor of its supervisor",
        )


def note_down(api: Api, events: Sequence[Event]) -> None:
    """Record that a fault was injected. If the supervisor is unreachable, raises Unreachable, which says that it
    was."""
    try:
        api.post("/v1/events", list(events))
    except Unreachable as error:
        raise Unreachable(
            f"The fault was injected, but the supervisor could not record it: {error.message}", hint=error.hint
        ) from error
