"""SIGTERM to one host's `flyball run` is a notice for that host: the job goes on without it, if any host is left."""

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

NOTICES: Final = frozenset({signal.SIGTERM, signal.SIGHUP})  # a batch system or a closed terminal, not a person's wish
LEAVE_TIMEOUT_S: Final = 15.0  # for the ranks to be saved and moved; batch systems send SIGKILL after 30 s
LEFT_AFTER_S: Final = 3.0  # without a report, a host under notice has left
OTHERS_S: Final = 10.0  # how long one without ranks looks whether all others leave too
SUPERVISOR_STAYS_S: Final = 30.0  # beyond that, for a move that has begun

_ABLE: Final = frozenset({HostState.HEALTHY, HostState.SPARE, HostState.SUSPECT})

Json = Mapping[str, Any]


class Daemon(Protocol):
    @property
    def has_ended(self) -> bool: ...

    def give_notice(self) -> None: ...


class Next(StrEnum):
    WAIT = "wait"
    STOP_JOB = "stop_job"  # no other host is left
    END = "end"  # this host is needed no more, or its time is over


def can_go_on(hosts: Iterable[Json], spec: JobSpec, leaving: str) -> bool:
    """Whether a host other than the one that leaves has, or may take, ranks of the job."""
    return any(
        host["host_id"] != leaving
        and HostState(host["state"]) in _ABLE
        and not (host.get("preempt_deadline_at") or host.get("left_at"))
        and (host.get("job") or spec.job) == spec.job
        and (not spec.hosts or host["host_id"] in spec.hosts)
        for host in hosts
    )


def is_there(host: Json) -> bool:
    """Whether a daemon of that name runs, by what its supervisor says. One that left is known for a while."""
    if host.get("left_at") or host["state"] in (HostState.SILENT, HostState.IN_REPAIR):
        return False
    return not host.get("preempt_deadline_at") or SystemClock().wall_s() - float(host["last_report_at"]) < LEFT_AFTER_S


class HostLeave:
    """One host's way out of a job of several hosts."""

    def __init__(self, spec: JobSpec, host_id: str, daemon: Daemon | None) -> None:
        """`daemon` None: one that others started, which gets a notice of its own."""
        self._spec = spec
        self._host_id = host_id
        self._daemon = daemon
        self._began_at = 0.0
        self._had_ranks = False
        self.has_begun = False
        self.has_left = False
        self._supervisor_again = ""  # the command that brings it up again, if this process keeps it

    def keeps_supervisor(self, host: str, port: str, folder: Path) -> None:
        """The job's supervisor lives in this process, and ends with it."""
        address = shlex.join(("--host", host, "--port", port, "--state-dir", str(folder)))
        self._supervisor_again = f"flyball up {address} (with the same FLYBALL_TOKEN)"

    def begin(self, number: signal.Signals) -> None:
        """Give notice."""
        self.has_begun = True
        self._began_at = time.monotonic()
        announce(
            f"{number.name}: host {self._host_id} leaves job {self._spec.job}: its ranks are saved and moved to a "
            f"spare within {LEAVE_TIMEOUT_S:.0f} s, then this command ends (again: at once)"
        )
        if self._daemon is not None:
            self._daemon.give_notice()

    def look(self, job: Json | None, hosts: Iterable[Json] | None, *, is_acting: bool) -> Next:
        """What to do now. None: the supervisor is out of reach."""
        waited_s = time.monotonic() - self._began_at
        is_here = self._daemon is not None and not self._daemon.has_ended
        if job is not None and hosts is not None:
            if not can_go_on(hosts, self._spec, self._host_id):
                announce(f"every host of job {self._spec.job} leaves: stopping the job")
                return Next.STOP_JOB
            self._had_ranks |= self._host_id in _hosts_of(job)
            if self._daemon is None and not self._had_ranks:
                return Next.STOP_JOB  # this command launched the job, and is no host of it
            others_may_leave = self._daemon is None or job["state"] == JobState.SUBMITTED.value
            if others_may_leave and waited_s < OTHERS_S:
                return Next.WAIT
            if is_acting and self._supervisor_again and waited_s < LEAVE_TIMEOUT_S + SUPERVISOR_STAYS_S:
                return Next.WAIT
        if is_here and waited_s < LEAVE_TIMEOUT_S + SUPERVISOR_STAYS_S:
            return Next.WAIT
        self.has_left = True
        return Next.END

    def announce_outcome(self, job: Json) -> None:
        """What this host leaves behind."""
        hosts, name = _hosts_of(job), self._spec.job
        left = f"host {self._host_id} left job {name}"
        if "ranks" not in job:
            announce(f"{left}; its supervisor was out of reach by then")
        elif not self.has_left:
            announce(f"{left} at once, without waiting for its ranks to be moved")
        elif self._daemon is None:
            announce(f"job {name} goes on; stop it with: flyball stop {name}")
        elif self._host_id in hosts:
            step = job.get("newest_step", -1)
            announce(
                f"{left}, and no host was free to take its ranks: the job holds after step {step} and goes on when a "
                "host joins"
            )
        elif hosts:
            announce(f"{left}, whose ranks are on {', '.join(hosts)} now")
        else:
            announce(f"{left}, which waits for hosts")
        if self._supervisor_again:
            announce(
                "the job's supervisor ends with this command: training goes on without one, but nothing recovers from "
                f"the next fault until it is up again: {self._supervisor_again}"
            )


def _hosts_of(job: Json) -> list[str]:
    return sorted({str(rank["host_id"]) for rank in job.get("ranks") or ()})
