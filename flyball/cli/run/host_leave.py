"""Leave a job: SIGTERM to `flyball run` on one of several hosts is a notice for that host, not for the whole job."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from flyball.cli.show.messages import announce
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostState, JobSpec, JobState

# From a batch system or a closed terminal, not a person.
NOTICES: Final = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
LEAVE_TIMEOUT_S: Final = 15.0  # for saving and moving the ranks; batch systems send SIGKILL after 30 s
LEFT_AFTER_S: Final = 3.0  # a host under notice that has not reported for this long has left
OTHERS_S: Final = 10.0  # how long a host without ranks waits to see whether all others leave too
SUPERVISOR_STAYS_S: Final = 30.0  # on top of that, to finish a move that has begun

_ABLE: Final = frozenset({HostState.HEALTHY, HostState.SPARE, HostState.SUSPECT})

Json = Mapping[str, Any]


class Daemon(Protocol):
    @property
    def has_ended(self) -> bool: ...

    def give_notice(self) -> None: ...


class Next(StrEnum):
    WAIT = "wait"
    STOP_JOB = "stop_job"  # no other host is left
    END = "end"  # this host is no longer needed, or its time is up


def others_can_continue(hosts: Iterable[Json], spec: JobSpec, leaving: str) -> bool:
    """Whether any host other than the leaving one has, or may take, ranks of the job."""
    return any(
        host["host_id"] != leaving
        and HostState(host["state"]) in _ABLE
        and not (host.get("preempt_deadline_at") or host.get("left_at"))
        and (host.get("job") or spec.job) == spec.job
        and (not spec.hosts or host["host_id"] in spec.hosts)
        for host in hosts
    )


def is_there(host: Json) -> bool:
    """Whether the host's daemon is running, judging by its entry at the supervisor, which outlives it for a while."""
    if host.get("left_at") or host["state"] in (HostState.SILENT, HostState.IN_REPAIR):
        return False
    return not host.get("preempt_deadline_at") or SystemClock().wall_s() - float(host["last_report_at"]) < LEFT_AFTER_S


class HostLeave:
    """How one host leaves a job of several hosts."""

    def __init__(self, spec: JobSpec, host_id: str, daemon: Daemon | None) -> None:
        """`daemon`: None if this command did not start it, so that it gets its own notice."""
        self._spec = spec
        self._host_id = host_id
        self._daemon = daemon
        self._began_at = 0.0
        self._had_ranks = False
        self.has_begun = False
        self.has_left = False
        self._supervisor_command = ""  # restarts the job's supervisor, if that runs in this process

    def keeps_supervisor(self, host: str, port: str, folder: Path) -> None:
        """Note that the job's supervisor runs in this process, and ends with it."""
        address = shlex.join(("--host", host, "--port", port, "--state-dir", str(folder)))
        self._supervisor_command = f"flyball up {address} (with the same FLYBALL_TOKEN)"

    def begin(self, number: signal.Signals) -> None:
        """Start leaving: give the daemon notice."""
        self.has_begun = True
        self._began_at = time.monotonic()
        if self._daemon is None:  # which moves nothing by itself: a notice of its own would
            announce(
                f"{number.name}: this command ends. Job {self._spec.job} goes on if host {self._host_id} has ranks of "
                "it, else it is stopped (another signal: at once)"
            )
            return
        announce(
            f"{number.name}: host {self._host_id} leaves job {self._spec.job}. Its ranks are saved and moved to a "
            f"spare within {LEAVE_TIMEOUT_S:.0f} s, then this command ends (another signal: at once)"
        )
        self._daemon.give_notice()

    def next_step(self, job: Json | None, hosts: Iterable[Json] | None, *, is_acting: bool) -> Next:
        """Choose the next step. `job` and `hosts` are None while the supervisor is out of reach."""
        waited_s = time.monotonic() - self._began_at
        is_here = self._daemon is not None and not self._daemon.has_ended
        if job is not None and hosts is not None:
            if not others_can_continue(hosts, self._spec, self._host_id):
                announce(f"every host of job {self._spec.job} leaves: stopping the job")
                return Next.STOP_JOB
            self._had_ranks |= self._host_id in _hosts_of(job)
            if self._daemon is None and not self._had_ranks:
                return Next.STOP_JOB  # this command only launched the job, from a machine without ranks
            others_may_leave = self._daemon is None or job["state"] == JobState.SUBMITTED.value
            if others_may_leave and waited_s < OTHERS_S:
                return Next.WAIT
            if is_acting and self._supervisor_command and waited_s < LEAVE_TIMEOUT_S + SUPERVISOR_STAYS_S:
                return Next.WAIT
        if is_here and waited_s < LEAVE_TIMEOUT_S + SUPERVISOR_STAYS_S:
            return Next.WAIT
        self.has_left = True
        return Next.END

    def announce_outcome(self, job: Json) -> None:
        """Announce what becomes of the job after this host has left."""
        hosts, name = _hosts_of(job), self._spec.job
        left = f"host {self._host_id} left job {name}"
        if "ranks" not in job:
            announce(f"{left}; at that time the supervisor was out of reach")
        elif not self.has_left:
            announce(f"{left} at once, without waiting for its ranks to be moved")
        elif self._daemon is None:
            announce(f"job {name} goes on; stop it with: flyball stop {name}")
        elif self._host_id in hosts:
            step = job.get("newest_step", -1)
            announce(f"{left}. No host was free to take its ranks: the job holds after step {step} until a host joins")
        elif hosts:
            announce(f"{left}. Its ranks are now on {', '.join(hosts)}")
        else:
            announce(f"{left}. The job waits for hosts")
        if self._supervisor_command:
            announce(
                "the job's supervisor ends with this command: training goes on, but nothing recovers from the next "
                f"fault until you start it again: {self._supervisor_command}"
            )


def _hosts_of(job: Json) -> list[str]:
    return sorted({str(rank["host_id"]) for rank in job.get("ranks") or ()})
