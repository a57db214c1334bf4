"""`flyball run`: what a user types in place of torchrun."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ckpt_engine.settings import CONFIG_VARIABLE, read_config
from flyball.cli import this_host
from flyball.cli.client import ApiClient
from flyball.cli.console import LogFollower
from flyball.cli.embedded import KeptSupervisor
from flyball.cli.host_process import HostProcess
from flyball.cli.job_watch import AWAY_LIMIT_S, Job, JobWatch, submit
from flyball.cli.output import print_json, say
from flyball.cli.places import Connection, find_supervisor, keep_token, make_state_dir, new_job_dir, state_root
from flyball.cli.signals import EndSignals
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.errors import (
    ConfigurationError,
    Conflict,
    JobFailed,
    NotFound,
    PortInUse,
    Unreachable,
    UsageError,
)
from flyball.launcher import RunRequest, build_parser, default_job_name, parse_run

RENDEZVOUS_TIMEOUT_S = 300.0
RENDEZVOUS_RETRY_S = 0.5
LINGER_S = 3.0  # after the end of a job of several hosts, so that each of them hears of it
OWN_HOST_REPORT_INTERVAL_S = 0.5

COMMAND: dict[str, Any] = {
    "help": "Run a training script under supervision, in place of torchrun.",
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


def command(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> int:
    """Listed in the help; main() hands the words on before typer sees them, since torchrun's grammar is argparse's."""
    return run(arguments or [])


def run(arguments: list[str]) -> int:
    """The exit code of a job: 0 it succeeded, 1 it failed, 128 + n a signal ended it."""
    request = parse_run(arguments, os.environ, read_config)
    if request.help:
        sys.stdout.write(build_parser().format_help())
        return 0
    for notice in request.notices:
        say(notice)
    _check_script(request)
    os.environ.update(request.tls.environment())  # for every client of this process, and the daemon
    spec = _job_spec(request)
    with EndSignals(request.stop_signals) as signals, ExitStack() as stack:
        if request.supervisor:
            session = _join(request, spec, find_supervisor(os.environ, url=request.supervisor), stack)
            session.away_limit_s = math.inf  # a cluster's supervisor comes back, and until then training goes on
        elif request.rendezvous:
            session = _meet(request, spec, stack, signals)
        else:
            session = _alone(request, spec, stack)
        job = session.follow(request, spec, signals, stack)
        if session.linger:
            time.sleep(LINGER_S)
    return _conclude(request, spec, job, session.logs(request, spec), signals)


class _Session:
    """A supervisor in reach and, unless one runs already, a daemon for this host."""

    def __init__(self, connection: Connection, daemon: HostProcess | None, *, linger: bool = False) -> None:
        self.connection = connection
        self.daemon = daemon
        self.linger = linger
        self.supervisor: KeptSupervisor | None = None  # if it lives in this process
        self.away_limit_s = AWAY_LIMIT_S

    def logs(self, request: RunRequest, spec: JobSpec) -> Path | None:
        """The folder of this host's rank logs; None if a daemon that others started keeps them."""
        if request.log_dir:
            return Path(spec.log_dir) / spec.job
        return self.daemon.state_dir / "logs" / spec.job if self.daemon else None

    def follow(self, request: RunRequest, spec: JobSpec, signals: EndSignals, stack: ExitStack) -> Job:
        client = stack.enter_context(ApiClient(self.connection.url, self.connection.token))
        job = submit(client, spec)
        if JobState(job["state"]).ended:
            raise Conflict(
                f"The job {spec.job} has ended already: {job['state']}.",
                hint="give this run another name with --job NAME",
            )
        follower = None
        logs = self.logs(request, spec)
        if logs:
            out = sys.stderr if request.output == "json" else sys.stdout
            follower = LogFollower(
                logs, request.console, nproc=spec.nproc_per_node, world_size=spec.world_size, out=out
            )
        try:
            watch = JobWatch(
                client,
                spec,
                signals,
                follower=follower,
                daemon=self.daemon,
                supervisor=self.supervisor,
                trains=lambda: bool(self.daemon and logs and self.daemon.trains(logs)),
                away_limit_s=self.away_limit_s,
            )
            return watch.wait()
        finally:
            if follower:
                follower.close()


def _alone(request: RunRequest, spec: JobSpec, stack: ExitStack) -> _Session:
    """Supervisor and daemon for the life of this one job."""
    folder = (
        make_state_dir(Path(request.state_dir)) if request.state_dir else new_job_dir(spec.job, os.environ).resolve()
    )
    supervisor = KeptSupervisor(folder / "supervisor")
    stack.callback(supervisor.stop)
    connection = Connection(supervisor.url, supervisor.token, folder / "supervisor" / "token")
    secret = f"/?token={supervisor.token}" if sys.stderr.isatty() else ""  # not into the log of a batch system
    say(f"job {spec.job}; status page {supervisor.url}{secret}")
    say(f"state and logs in {folder}")
    daemon = _start_daemon(request, spec, connection, folder / "host", stack)
    session = _Session(connection, daemon)
    session.supervisor = supervisor
    return session


def _join(request: RunRequest, spec: JobSpec, connection: Connection, stack: ExitStack) -> _Session:
    """A cluster's supervisor; this host joins it unless it has."""
    name = request.host_id or this_host.host_id()
    with ApiClient(connection.url, connection.token) as client:
        try:
            state = str(client.get(f"/v1/hosts/{name}")["state"])
        except NotFound:
            state = ""
    if state not in ("", "silent", "in_repair"):
        say(f"host {name} has joined {connection.url} already")
        for variable in request.engine_environment:
            say(f"{variable}: not used: the engine of {name} has its settings from `flyball host`")
        return _Session(connection, None)
    folder = make_state_dir(Path(request.state_dir) if request.state_dir else state_root(os.environ) / "hosts" / name)
    daemon = _start_daemon(request, spec, connection, folder, stack)
    say(f"host {name} joins {connection.url}")
    return _Session(connection, daemon)


def _meet(request: RunRequest, spec: JobSpec, stack: ExitStack, signals: EndSignals) -> _Session:
    """Several hosts without a running supervisor: it comes up where the rendezvous address is, the others join it."""
    token = os.environ.get("FLYBALL_TOKEN", "").strip()
    if not token:
        raise ConfigurationError(
            "Hosts that meet at a rendezvous address need a common secret.",
            hint="export the same FLYBALL_TOKEN (at least 16 characters) on every host",
        )
    host, _, port = request.rendezvous.rpartition(":")
    url = f"http://{request.rendezvous}"
    connection = Connection(url, token, None)
    supervisor: KeptSupervisor | None = None
    here = request.node_rank == 0 if request.node_rank is not None else this_host.is_here(host)
    if here:
        folder = (
            make_state_dir(Path(request.state_dir) / "supervisor")
            if request.state_dir
            else new_job_dir(request.job, os.environ).resolve() / "supervisor"
        )
        try:
            supervisor = KeptSupervisor(folder, host=host.strip("[]"), port=int(port), token=token)
        except PortInUse:
            if request.node_rank == 0:
                raise
            here = False  # another run on this machine was first
        else:
            stack.callback(supervisor.stop)
            say(f"supervisor of job {request.job} at {url}")
            if not this_host.is_here_only(host):
                say("no TLS between the hosts: whoever listens on their network can read the token")
    if not here:
        _await_supervisor(connection, signals)
    session = _join(request, spec, connection, stack)
    session.supervisor = supervisor if here else None
    session.linger = here
    return session


def _await_supervisor(connection: Connection, signals: EndSignals) -> None:
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    say(f"waiting for the supervisor at {connection.url}")
    with ApiClient(connection.url, connection.token) as client:
        while True:
            try:
                client.items("/v1/hosts")
                return
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
            if signals.count:
                raise KeyboardInterrupt
            time.sleep(RENDEZVOUS_RETRY_S)


def _start_daemon(
    request: RunRequest, spec: JobSpec, connection: Connection, folder: Path, stack: ExitStack
) -> HostProcess:
    token_file = connection.token_file or keep_token(folder.parent / f"{folder.name}.token", connection.token)
    daemon = HostProcess(
        host_id=request.host_id or this_host.host_id(),
        state_dir=folder,
        supervisor_url=connection.urls,
        token_file=token_file,
        address=request.local_addr or this_host.address_towards(connection.url),
        report_interval_s=OWN_HOST_REPORT_INTERVAL_S,
        warm_nproc=0 if spec.env else spec.nproc_per_node,  # while the job is being submitted
        environ=_daemon_environment(request),
    )
    stack.callback(daemon.stop)
    daemon.start()
    return daemon


def _daemon_environment(request: RunRequest) -> dict[str, str]:
    """That of this process, and the checkpoint settings of the host, for its engine and its workers."""
    settings = dict(request.engine_environment)
    if CONFIG_VARIABLE in settings:
        settings[CONFIG_VARIABLE] = str(Path(settings[CONFIG_VARIABLE]).resolve())
    return {**os.environ, **settings}


def _check_script(request: RunRequest) -> None:
    script = Path(request.argv[0])
    if not request.module and not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        raise UsageError(
            f"The script {script} {what}.", hint="give the path of a Python file, or -m and the name of a module"
        )


def _job_spec(request: RunRequest) -> JobSpec:
    def absolute(folder: str) -> str:
        return str(Path(folder).resolve()) if folder and "://" not in folder else folder

    checkpoint = request.checkpoint
    return JobSpec(
        job=request.job or default_job_name(request, secrets.token_hex(2)),
        argv=request.argv,
        workdir=str(Path.cwd()),
        nnodes=request.nnodes,
        nproc_per_node=this_host.workers_per_host(request.nproc_per_node),
        max_restarts=request.max_restarts,
        module=request.module,
        env={"ROLE_NAME": request.role} if request.role != "default" else {},
        log_dir=absolute(request.log_dir),
        checkpoint=msgspec.structs.replace(
            checkpoint, disk_dir=absolute(checkpoint.disk_dir), persistent_dir=absolute(checkpoint.persistent_dir)
        ),
        stop_grace_s=request.stop_grace_s,
    )


def _conclude(request: RunRequest, spec: JobSpec, job: Job, logs: Path | None, signals: EndSignals) -> int:
    state = JobState(job["state"])
    where = f"; logs in {logs}" if logs else ""
    if request.output == "json":
        print_json({**job, "log_dir": str(logs) if logs else None})
    if signals.count:
        say(f"job {spec.job} was stopped{where}")
        return signals.exit_code
    if state is JobState.SUCCEEDED:
        restarts = job.get("restart_count", 0)
        again = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
        say(f"job {spec.job} succeeded{again}{where}")
        return 0
    if state is JobState.STOPPED:
        say(f"job {spec.job} was stopped by an operator{where}")
        return 1
    raise JobFailed(
        f"The job {spec.job} {state.value}: {job.get('message') or 'no message'}",
        hint=f"read the ranks' logs in {logs}" if logs else "read the ranks' logs on the hosts",
    )
