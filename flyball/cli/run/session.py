"""The state of one `flyball run`: its supervisor, this host's daemon, the ranks' output, and how it ends."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ckpt_engine.settings import CONFIG_VARIABLE
from flyball.batch_step import lead_step
from flyball.cli.logs.console import LogFollower
from flyball.cli.logs.log_mirror import RankZeroElsewhere
from flyball.cli.reach import this_host
from flyball.cli.reach.places import SupervisorConnection, keep_token
from flyball.cli.run.embedded import KeptSupervisor
from flyball.cli.run.ending import Ending, is_in_memory_alone
from flyball.cli.run.host_leave import HostLeave, is_there
from flyball.cli.run.host_process import HostProcess, is_written
from flyball.cli.run.job_watch import AWAY_LIMIT_S, Job, JobWatch, known_decisions, submit
from flyball.cli.run.own_terminal import OwnTerminal, console_request
from flyball.cli.run.resume import Submission
from flyball.cli.show.messages import announce, announce_within
from flyball.cli.signals import EndSignals
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.errors import Conflict, FlyballError
from flyball.launch.forwarded_environment import explicit, select
from flyball.launch.launcher import RunRequest
from flyball.sealed_values import seal

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient
    from flyball.contracts.cluster import JobSpec
    from flyball.launch.launcher import RunRequest

OWN_HOST_REPORT_INTERVAL_S: Final = 0.5
OTHERS_TIMEOUT_S: Final = 10.0
OTHERS_LOOK_INTERVAL_S: Final = 0.2


class Session:
    """A reachable supervisor and, unless one is running already, a daemon for this host."""

    def __init__(
        self, connection: SupervisorConnection, daemon: HostProcess | None, leave: HostLeave | None = None
    ) -> None:
        self.connection = connection
        self.daemon = daemon
        self.leave = leave  # if other hosts may continue without this one
        self.keeps_supervisor_of_others = False  # whether other hosts' commands use the supervisor in this process
        self.supervisor: KeptSupervisor | None = None  # if it runs in this process
        self.host_dir = daemon.state_dir if daemon else None  # of this machine's daemon, whoever started it
        self.away_limit_s = AWAY_LIMIT_S
        self.spec: JobSpec | None = None  # if the job got another name
        self.submission = Submission()
        self.ending: Ending | None = None  # if everything ends with this command
        self.job: Job | None = None  # as it was last seen, once `follow` has returned
        self.resume_command = ""
        self.once_attached = ""  # what to announce when a rank has called `flyball.attach`

    def logs(self, request: RunRequest, spec: JobSpec) -> Path | None:
        """The folder of this host's rank logs; None if unknown."""
        if request.log_dir:
            return Path(spec.log_dir) / spec.job
        return self.host_dir / "logs" / spec.job if self.host_dir else None

    def follow(self, request: RunRequest, spec: JobSpec, signals: EndSignals, stack: ExitStack) -> Job:
        client = stack.enter_context(client_of(self.connection))
        if request.supervisor:
            spec = _with_environment(spec, request, self.connection.token)
        output = JobOutput(request, spec, stack)
        output.share_terminal(self.host_dir)
        known = known_decisions(client, spec.job)
        job = submit(client, spec, self.submission.query)
        if JobState(job["state"]).ended:
            raise Conflict(
                f"The job {spec.job} has already ended again: {job['state']}.",
                hint="run the same command once more to resume it, or give this run another name with --job NAME",
            )
        logs = self.logs(request, spec)
        # If another host has already submitted it again, generations before its newest belong to the earlier run.
        after = job["generation"] - (JobState(job["state"]) is not JobState.SUBMITTED)
        if logs:
            output.follow(logs, after=after)
        # At a rendezvous each host has such a command, which shows its own ranks; the supervisor's shows decisions.
        if (not request.rendezvous and self.supervisor is None) or logs is None:
            output.follow_rank_zero(client, after=after, also_here=logs is None)
        watch = JobWatch(
            client,
            spec,
            signals,
            daemon=self.daemon,
            supervisor=self.supervisor,
            trains=lambda: bool(self.daemon and logs and is_written(logs)),
            away_limit_s=self.away_limit_s,
            leave=self.leave,
        )
        watch.leave_out(known)
        watch.once_attached = self.once_attached
        watch.announces_decisions = not request.rendezvous or self.supervisor is not None
        job = self.job = watch.wait()
        if self.ending is not None:
            self.ending.state = JobState(job["state"])
            self.ending.is_in_memory_alone = is_in_memory_alone(job)
        return job

    def wait_for_other_hosts(self, signals: EndSignals) -> None:
        """Keep the supervisor until the commands on the other hosts have seen the job's end and left."""
        deadline = time.monotonic() + min(OTHERS_TIMEOUT_S, signals.left_s / 2)
        own = self.daemon.host_id if self.daemon else ""
        with client_of(self.connection) as client:
            while time.monotonic() < deadline and signals.count <= 1:
                try:
                    hosts = client.everything("/v1/hosts")
                except FlyballError:  # then nobody else can reach it either
                    return
                if not any(is_there(host) for host in hosts if host["host_id"] != own):
                    return
                time.sleep(OTHERS_LOOK_INTERVAL_S)


def client_of(connection: SupervisorConnection) -> ApiClient:
    from flyball.cli.reach.client import ApiClient  # imports httpx, for which the daemon's start must not wait

    return ApiClient(connection.url, connection.token)


def start_daemon(
    request: RunRequest, spec: JobSpec, connection: SupervisorConnection, folder: Path, stack: ExitStack
) -> HostProcess:
    """Start this host's daemon. By default its memory outlives it, until the job's end shows that it need not."""
    token_file = connection.token_file or keep_token(folder.parent / f"{folder.name}.token", connection.token)
    daemon = HostProcess(
        host_id=request.host_id or this_host.host_id(),
        state_dir=folder,
        supervisor_url=connection.urls,
        token_file=token_file,
        address=request.local_addr or _own_address(request, connection),
        report_interval_s=OWN_HOST_REPORT_INTERVAL_S,
        warm_nproc=0 if spec.env else spec.nproc_per_node,  # warms up while the job is being submitted
        environ=_daemon_environment(request),
    )
    daemon.keeps_segments = True
    stack.callback(daemon.stop)
    daemon.start()
    return daemon


def _own_address(request: RunRequest, connection: SupervisorConnection) -> str:
    """The IP address at which other hosts reach this one."""
    host = request.rendezvous.rpartition(":")[0]
    if host and this_host.listen_address(host) == this_host.EVERYWHERE:  # its name resolves to 127.0.1.1 here
        return this_host.address_towards(this_host.BEYOND)
    return this_host.address_towards(connection.url)


def _daemon_environment(request: RunRequest) -> dict[str, str]:
    """This process's environment plus the host's checkpoint settings, for the daemon, its engine and its workers."""
    settings = dict(request.engine_environment)
    if CONFIG_VARIABLE in settings:
        settings[CONFIG_VARIABLE] = str(Path(settings[CONFIG_VARIABLE]).resolve())
    environment = {**os.environ, **settings, **explicit(os.environ, request.env)}
    if request.batch:
        lead_step(environment)
    return environment


def _with_environment(spec: JobSpec, request: RunRequest, token: str) -> JobSpec:
    """Add the user's variables to the job, for daemons started elsewhere. This run's own daemon inherits them."""
    forwarded = select(os.environ, request.env)
    if forwarded.secret:
        announce(f"secret variables, encrypted for the hosts: {', '.join(sorted(forwarded.secret))}")
    return msgspec.structs.replace(
        spec, user_env=forwarded.plain, sealed_env=seal(forwarded.secret, secret=token, job=spec.job)
    )


# --- output ----------------------------------------------------------------------------------------------------------


class JobOutput:
    """Shows the ranks' output until `stack` is closed. With --output json, stdout is for the result."""

    def __init__(self, request: RunRequest, spec: JobSpec, stack: ExitStack) -> None:
        self._request = request
        self._spec = spec
        self._stack = stack
        self._out = sys.stderr if request.output == "json" else sys.stdout
        self._terminal: OwnTerminal | None = None

    def share_terminal(self, host_dir: Path | None) -> None:
        """Give the workers on this machine access to this terminal. Call before the job is submitted."""
        terminal = console_request(
            self._request.console,
            self._spec.nproc_per_node,
            os.environ,
            out=self._out,
            err=sys.stderr,
            one_rank=self._spec.world_size == 1,
        )
        if terminal is not None and host_dir is not None and os.access(host_dir, os.W_OK):
            self._terminal = OwnTerminal(host_dir, self._spec.job, terminal)
            self._stack.enter_context(self._terminal.shared())

    def follow(self, logs: Path, *, after: int) -> None:
        """Show the output of this machine's ranks. `after`: the last generation that was already shown."""
        follower = self._follower(logs, after)
        self._stack.enter_context(announce_within(follower.own_line))
        self._stack.callback(follower.close)
        if self._terminal:
            self._stack.callback(self._terminal.drain)
        follower.start()

    def follow_rank_zero(self, client: ApiClient, *, after: int, also_here: bool) -> None:
        """Show rank 0's output if all ranks are on other hosts or, with `also_here`, wherever they are."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="flyball-logs-")))
        follower = self._follower(folder, after)
        self._stack.callback(follower.close)
        follower.start()
        host_id = "" if also_here else self._request.host_id or this_host.host_id()
        elsewhere = RankZeroElsewhere(client, self._spec.job, host_id, folder)
        self._stack.callback(elsewhere.close)
        elsewhere.start()

    def _follower(self, logs: Path, after: int) -> LogFollower:
        return LogFollower(
            logs,
            self._request.console,
            nproc=self._spec.nproc_per_node,
            role=self._request.role,
            out=self._out.buffer,
            err=sys.stderr.buffer,
            on_broken_pipe=lambda: announce(f"nobody reads the output any more; training goes on, with logs in {logs}"),
            begins_at=lambda _path, generation, _rank: 0 if generation > after else None,
        )
