"""Join a cluster's supervisor, or meet the job's other hosts at a rendezvous address, as under torchrun."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from flyball.cli.logs import job_logs
from flyball.cli.reach import this_host
from flyball.cli.reach.places import SupervisorConnection, make_state_dir, state_root
from flyball.cli.run.embedded import KeptSupervisor
from flyball.cli.run.ending import announce_kept_step, settle_memory
from flyball.cli.run.host_leave import HostLeave, is_there
from flyball.cli.run.resume import prepare_at_supervisor, where_checkpoints_go
from flyball.cli.run.run_folders import claim_folder, folder_name
from flyball.cli.run.session import Session, client_of, start_daemon
from flyball.cli.show.messages import announce
from flyball.cli.signals import EndSignals
from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import ConfigurationError, NotFound, PortInUse, Unreachable
from flyball.launch.launcher import RunRequest
from flyball.state_folder import try_lock
from host_daemon.store.state_dir import host_of
from services.runtime.claim import bind_listener

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient

TRUSTED_VARIABLE = "FLYBALL_TRUSTED_NETWORK"
MAX_NODES_HERE = 64
RENDEZVOUS_TIMEOUT_S = 300.0
RENDEZVOUS_RETRY_S = 0.5
RESOLVED_WITHIN_S = 15.0  # the name of a host that is only just starting may be new
FIRST_NEWS_S, NEWS_INTERVAL_S = 5.0, 30.0
REPORTS_WITHIN_S = 15.0  # a daemon that runs: its interval, and its pause after a supervisor that was away
OWN_REPORTS_WITHIN_S = 3.0
REPORT_LOOK_S = 0.1


def join(
    request: RunRequest, spec: JobSpec, connection: SupervisorConnection, stack: ExitStack, signals: EndSignals
) -> Session:
    """Join this host to a cluster's supervisor, unless its daemon is already running there."""
    name = request.host_id or this_host.host_id()
    with client_of(connection) as client:
        # At a rendezvous this command alone has the name of this node; in a cluster a daemon may report seldom.
        within_s = OWN_REPORTS_WITHIN_S if request.rendezvous else REPORTS_WITHIN_S
        joined = _has_joined(client, connection, name, signals, within_s)
        spec, submission = prepare_at_supervisor(client, request, spec, signals.check)
    if joined:
        announce(f"host {name} has already joined {connection.url}")
        for variable in request.engine_environment:
            announce(f"ignoring {variable}: the engine of {name} got its settings from `flyball host`")
        session = Session(connection, None, HostLeave(spec, name, None))
        session.spec, session.submission = spec, submission
        session.host_dir = job_logs.daemon_dir(name, connection.url)
        if session.host_dir:
            announce(f"logs in {Path(spec.log_dir or session.host_dir / 'logs') / spec.job}")
            session.once_attached = where_checkpoints_go(spec.checkpoint, session.host_dir)
        stack.callback(
            lambda: announce_kept_step(spec, session.job, name, session.host_dir, command=session.resume_command)
        )
        return session
    folder = make_state_dir(_host_folder(request, name, spec.job))
    daemon = start_daemon(request, spec, connection, folder, stack)
    announce(f"host {name} joins {connection.url}")
    leave = HostLeave(spec, name, daemon)
    session = Session(connection, daemon, leave)
    stack.callback(
        lambda: settle_memory(daemon, spec, session.job, has_left=leave.has_left, command=session.resume_command)
    )
    session.spec, session.submission = spec, submission
    session.once_attached = where_checkpoints_go(spec.checkpoint, folder.resolve())
    return session


def meet(request: RunRequest, spec: JobSpec, stack: ExitStack, signals: EndSignals) -> Session:
    """Start the job's supervisor if the rendezvous address is this machine's, else join it there."""
    token = common_token(request, os.environ)
    request = msgspec.structs.replace(request, host_id=claim_host_id(request, os.environ, stack))
    host, _, port = request.rendezvous.rpartition(":")
    url = f"http://{request.rendezvous}"
    connection = SupervisorConnection(url, token, None)
    supervisor: KeptSupervisor | None = None
    here = request.node_rank == 0 if request.node_rank is not None else this_host.is_here(host)
    if here:
        address = this_host.listen_address(host)
        try:  # before claiming the job's folder, which is for one node of this machine only
            listener = bind_listener(address, int(port))
        except PortInUse:
            if request.node_rank == 0:
                raise
            here = False  # another node on this machine was first
    if here:
        folder = make_state_dir(_folder_of_meeting(request, stack) / "supervisor")
        supervisor = KeptSupervisor(folder, host=address, token=token, listener=listener, only_job=spec.job)
        stack.callback(supervisor.stop)
        supervisor.start()
        announce(f"supervisor of job {request.job} at {url}")
        if not this_host.is_loopback_name(host):
            announce("no TLS between the hosts: anybody who can listen on their network can read the token")
    else:
        _await_supervisor(connection, signals)
    session = join(request, spec, connection, stack, signals)
    session.supervisor = supervisor if here else None
    if here and session.leave is not None:
        session.leave.keeps_supervisor(host.strip("[]"), port, folder)
    session.keeps_supervisor_of_others = here
    if request.batch:  # its signal is for all hosts of the job: it stops, and no host leaves
        session.leave = None
    return session


def _has_joined(
    client: ApiClient, connection: SupervisorConnection, name: str, signals: EndSignals, within_s: float
) -> bool:
    """Whether the host's daemon runs. What is stored about a host may be of a run whose processes were killed: unless
    the daemon is seen here, one more report has to come."""
    deadline, before = time.monotonic() + within_s, -1.0
    while True:
        try:
            host = client.get(f"/v1/hosts/{name}")
        except NotFound:
            return False
        if not is_there(host):
            return False
        if job_logs.daemon_dir(name, connection.url) is not None:
            return True
        reported_at = float(host["last_report_at"])
        if 0.0 <= before < reported_at:
            return True
        before = reported_at
        if time.monotonic() > deadline:
            return False
        signals.check()
        time.sleep(REPORT_LOOK_S)


def _host_folder(request: RunRequest, name: str, job: str) -> Path:
    """The state folder of this host's daemon. At a rendezvous it is this job's alone: the next job has a supervisor of
    its own, to which nobody tells what the daemon of this one held."""
    if request.state_dir:
        return Path(request.state_dir)
    hosts = state_root(os.environ) / "hosts"
    if not request.rendezvous or (hosts / name / "logs" / job).exists():  # 0.1.0 had one for all jobs
        return hosts / name
    return hosts / folder_name(f"{name}.{job}")


def _folder_of_meeting(request: RunRequest, stack: ExitStack) -> Path:
    if request.state_dir:
        return Path(request.state_dir)
    home = claim_folder(request.job, os.environ)
    stack.callback(home.close)
    return home.path


def _await_supervisor(connection: SupervisorConnection, signals: EndSignals) -> None:
    began = time.monotonic()
    announced, host = began + FIRST_NEWS_S - NEWS_INTERVAL_S, urlsplit(connection.url).hostname or ""
    announce(f"waiting for the supervisor at {connection.url}")
    with client_of(connection) as client:
        while True:
            try:
                client.items("/v1/hosts")
                return
            except Unreachable as error:
                waited_s = time.monotonic() - began
                if waited_s > RENDEZVOUS_TIMEOUT_S:
                    raise
                if waited_s > RESOLVED_WITHIN_S and not this_host.is_known(host):
                    raise ConfigurationError(
                        f"The host name {host}, at which the hosts of the job meet, cannot be resolved.",
                        hint="check --rdzv-endpoint or --master-addr, or give an IP address",
                    ) from error
            if time.monotonic() - announced > NEWS_INTERVAL_S:
                announced = time.monotonic()
                announce(
                    f"nobody answers at {connection.url} yet: waiting for `flyball run` on the host that has this "
                    f"address, for {RENDEZVOUS_TIMEOUT_S - waited_s:.0f} s more. Is it this host? Add --node-rank 0"
                )
            signals.check()
            time.sleep(RENDEZVOUS_RETRY_S)


def common_token(request: RunRequest, environ: Mapping[str, str]) -> str:
    """The secret that all hosts of the job share. Raises ConfigurationError if there is none."""
    token = environ.get("FLYBALL_TOKEN", "").strip()
    if token:
        return token
    if not request.trusted_network and environ.get(TRUSTED_VARIABLE, "") in ("", "0"):
        raise ConfigurationError(
            "Hosts that meet at a rendezvous address need a common secret.",
            hint=f"first run this on every host: export FLYBALL_TOKEN={secrets.token_hex(16)}   "
            "(the same secret everywhere; or add --trusted-network if everybody on the network may join)",
        )
    host, _, port = request.rendezvous.rpartition(":")
    if not this_host.is_loopback_name(host):
        announce(
            f"trusted network: anybody who can reach port {port} and knows the job's name can join, and run programs "
            "on its hosts"
        )
    # Without the host: one machine may call it localhost, another by its name.
    return "trusted-network-" + hashlib.sha256(f"{request.job}:{port}".encode()).hexdigest()


def claim_host_id(request: RunRequest, environ: Mapping[str, str], stack: ExitStack) -> str:
    """A name for this node: the machine's, with a number if several nodes run on one machine.

    Claims the lowest free number for the life of this process, so that nodes get the same names the next time: that of
    their state folder, if the user names one that was in use before.
    """
    if request.host_id:
        return request.host_id
    name = this_host.host_id()
    folder = state_root(environ) / "nodes"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = [name, *(f"{name[:60]}-{number}" for number in range(2, MAX_NODES_HERE + 1))]
    if request.state_dir and (before := host_of(Path(request.state_dir))) in names:
        names.insert(0, before)
    for candidate in names:
        if (lock := try_lock(folder / candidate)) is not None:
            stack.callback(os.close, lock)
            return candidate
    raise ConfigurationError(
        f"{MAX_NODES_HERE} nodes of jobs are already running on this machine.", hint="name this one with --host-id NAME"
    )
