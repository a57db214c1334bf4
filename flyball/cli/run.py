"""`flyball run`: what a user types in place of torchrun."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_engine.settings import CONFIG_VARIABLE, read_config
from flyball.cli import job_logs, this_host
from flyball.cli.beginning import Submission, begin, begin_at, record_of, say_where_it_goes, with_default_tier
from flyball.cli.embedded import KeptSupervisor
from flyball.cli.ending import Ending, same_command, say_what_is_kept, settle_memory
from flyball.cli.host_leave import HostLeave, is_there
from flyball.cli.host_process import HostProcess
from flyball.cli.job_output import JobOutput
from flyball.cli.job_watch import AWAY_LIMIT_S, Job, JobWatch, submit
from flyball.cli.meeting import claim_host_id, common_token
from flyball.cli.messages import print_json, say
from flyball.cli.places import Connection, find_supervisor, keep_token, make_state_dir, state_root
from flyball.cli.runs import RunFolder, find_run, take
from flyball.cli.signals import EndSignals
from flyball.contracts.checkpoints import STATE_DIR_DISK
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.errors import (
    Conflict,
    JobFailed,
    NotFound,
    PortInUse,
    Unreachable,
    UsageError,
)
from flyball.forwarded_environment import explicit, select
from flyball.launch_grammar import help_text
from flyball.launcher import RunRequest, default_job_name, parse_run
from flyball.programs import find_program
from flyball.sealed_values import seal
from services.runtime.listener import bind_listener

if TYPE_CHECKING:
    from flyball.cli.client import ApiClient

RENDEZVOUS_TIMEOUT_S = 300.0
RENDEZVOUS_RETRY_S = 0.5
LINGER_S = 3.0  # after the end of a job of several hosts, so that each of them hears of it
OWN_HOST_REPORT_INTERVAL_S = 0.5


def run(arguments: list[str]) -> int:
    """The exit code of a job: 0 it succeeded, 1 it failed, 128 + n a signal ended it."""
    request = parse_run(arguments, os.environ, read_config)
    if request.help:
        sys.stdout.write(help_text())
        return 0
    for notice in request.notices:
        say(notice)
    if request.resume:
        request, arguments = _with_earlier_command(request, arguments)
    if request.rendezvous and not request.job:  # hosts that meet run the same command
        request = msgspec.structs.replace(request, job=default_job_name(request, str(Path.cwd())))
    _check_script(request)
    os.environ.update(request.tls.environment())  # for every client of this process, and the daemon
    explicit(os.environ, request.env)  # a mistake in it is told before anything starts
    spec = _job_spec(request)
    if request.supervisor or request.rendezvous:
        spec = msgspec.structs.replace(spec, checkpoint=with_default_tier(request, spec.checkpoint, STATE_DIR_DISK))
    with EndSignals(request.stop_signals) as signals, ExitStack() as stack:
        if request.supervisor:
            session = _join(request, spec, find_supervisor(os.environ, url=request.supervisor), stack)
            session.away_limit_s = math.inf  # a cluster's supervisor comes back, and until then training goes on
        elif request.rendezvous:
            session = _meet(request, spec, stack, signals)
        else:
            home = take(spec.job, os.environ, state_dir=request.state_dir)
            stack.callback(home.close)
            checkpoint = with_default_tier(request, spec.checkpoint, str(home.checkpoints))
            spec = msgspec.structs.replace(spec, job=home.job, checkpoint=checkpoint)
            session = _alone(request, spec, home, tuple(arguments), (stack, signals))
        session.again = same_command(request, arguments)
        spec = session.spec or spec
        job = session.follow(request, spec, signals, stack)
        if session.linger:
            time.sleep(LINGER_S)
    return _conclude(request, spec, job, session, signals)


class _Session:
    """A supervisor in reach and, unless one runs already, a daemon for this host."""

    def __init__(self, connection: Connection, daemon: HostProcess | None, leave: HostLeave | None = None) -> None:
        self.connection = connection
        self.daemon = daemon
        self.leave = leave  # where other hosts may go on without this one
        self.linger = False
        self.supervisor: KeptSupervisor | None = None  # if it lives in this process
        self.host_dir = daemon.state_dir if daemon else None  # of the daemon on this machine, whoever started it
        self.away_limit_s = AWAY_LIMIT_S
        self.spec: JobSpec | None = None  # if it has another name than it was given
        self.submission = Submission()
        self.ending: Ending | None = None  # if all of it ends with this command
        self.state: JobState | None = None  # of the job, when this command is done with it
        self.again = ""  # the command that goes on

    def logs(self, request: RunRequest, spec: JobSpec) -> Path | None:
        """The folder of this host's rank logs; None if it is not known."""
        if request.log_dir:
            return Path(spec.log_dir) / spec.job
        return self.host_dir / "logs" / spec.job if self.host_dir else None

    def follow(self, request: RunRequest, spec: JobSpec, signals: EndSignals, stack: ExitStack) -> Job:
        client = stack.enter_context(_client(self.connection))
        if request.supervisor:
            spec = _with_environment(spec, request, self.connection.token)
        output = JobOutput(request, spec, stack)
        output.lend_terminal(self.host_dir)
        job = submit(client, spec, self.submission.query)
        if JobState(job["state"]).ended:
            raise Conflict(
                f"The job {spec.job} has ended again already: {job['state']}.",
                hint="run the same command once more to go on with it, or give this run another name with --job NAME",
            )
        logs = self.logs(request, spec)
        # Another host may have submitted it again already: generations before its newest belong to its earlier life.
        after = job["generation"] - (JobState(job["state"]) is not JobState.SUBMITTED)
        if logs:
            output.follow(logs, after=after)
        if self.supervisor is None or spec.nnodes > 1:
            output.follow_rank_zero(client, after=after, also_here=logs is None)
        watch = JobWatch(
            client,
            spec,
            signals,
            daemon=self.daemon,
            supervisor=self.supervisor,
            trains=lambda: bool(self.daemon and logs and self.daemon.trains(logs)),
            away_limit_s=self.away_limit_s,
            leave=self.leave,
        )
        job = watch.wait()
        self.state = JobState(job["state"])
        if self.ending is not None:
            self.ending.state = self.state
        return job


def _client(connection: Connection) -> ApiClient:
    from flyball.cli.client import ApiClient  # httpx: the daemon starts before it is imported

    return ApiClient(connection.url, connection.token)


def _alone(
    request: RunRequest,
    spec: JobSpec,
    home: RunFolder,
    arguments: tuple[str, ...],
    ending: tuple[ExitStack, EndSignals],
) -> _Session:
    """Supervisor and daemon for the life of this one job."""
    stack, signals = ending
    folder, host_id = home.path, request.host_id or (home.before.host_id if home.before else this_host.host_id())
    submission = begin(request, spec, home, host_id=host_id, environ=os.environ, check=signals.check)
    record = record_of(request, spec, arguments, host_id=host_id)
    home.write(record)
    supervisor = KeptSupervisor(folder / "supervisor")
    stack.callback(supervisor.stop)
    connection = Connection(supervisor.url, supervisor.token, supervisor.token_file)
    secret = f"/?token={supervisor.token}" if sys.stderr.isatty() else ""  # not into the log of a batch system
    say(f"job {spec.job}; status page {supervisor.url}{secret}")
    say(f"state and logs in {folder}")
    say_where_it_goes(spec.checkpoint, home.host)
    # The daemon first: it has torch imported, which takes longest, while this process imports the supervisor.
    mine = msgspec.structs.replace(request, host_id=host_id)
    daemon = _start_daemon(mine, spec, connection, home.host, stack)
    final = Ending(home, spec, record, daemon, signals, environ=os.environ)
    stack.callback(final.run)
    supervisor.start()
    session = _Session(connection, daemon)
    session.supervisor, session.submission = supervisor, submission
    session.ending = final
    return session


def _with_earlier_command(request: RunRequest, arguments: list[str]) -> tuple[RunRequest, list[str]]:
    """`--resume [JOB]`: what the earlier run was, with the flags of this one. With a script, that is run."""
    if request.argv and (request.module or request.program or Path(request.argv[0]).is_file()):
        return request, arguments
    if request.supervisor:
        raise UsageError(
            "--resume finds the runs of this machine; a supervisor's are known by their script.",
            hint="give the same command as before: it goes on by itself",
        )
    if len(request.argv) > 1:
        raise UsageError(
            f"{request.argv[0]} is no script, and --resume takes one job.", hint="flyball run --resume JOB"
        )
    job = request.argv[0] if request.argv else request.job
    record = find_run(job, os.environ, state_dir=request.state_dir)
    try:
        os.chdir(record.workdir)
    except OSError as error:
        raise NotFound(
            f"The folder {record.workdir}, where job {record.job} ran, cannot be entered: {error.strerror}.",
            hint=f"bring it back, or say where the script is now: flyball run --resume --job {record.job} SCRIPT",
        ) from error
    flags = arguments[: len(arguments) - len(request.argv)]
    resumed = parse_run(flags, os.environ, read_config, before=record.arguments)
    state_dir = request.state_dir or record.state_dir
    resumed = msgspec.structs.replace(resumed, job=record.job, resume=True, state_dir=state_dir)
    return resumed, [*record.arguments]


def _join(request: RunRequest, spec: JobSpec, connection: Connection, stack: ExitStack) -> _Session:
    """A cluster's supervisor; this host joins it unless it has."""
    name = request.host_id or this_host.host_id()
    with _client(connection) as client:
        try:
            joined = is_there(client.get(f"/v1/hosts/{name}"))
        except NotFound:
            joined = False
        spec, submission = begin_at(client, request, spec)
    if joined:
        say(f"host {name} has joined {connection.url} already")
        for variable in request.engine_environment:
            say(f"{variable}: not used: the engine of {name} has its settings from `flyball host`")
        session = _Session(connection, None, HostLeave(spec, name, None))
        session.spec, session.submission = spec, submission
        session.host_dir = job_logs.daemon_dir(name, connection.url)
        if session.host_dir:
            say(f"logs in {Path(spec.log_dir or session.host_dir / 'logs') / spec.job}")
            say_where_it_goes(spec.checkpoint, session.host_dir)
        stack.callback(lambda: say_what_is_kept(spec, session.state, name, session.host_dir, again=session.again))
        return session
    folder = make_state_dir(Path(request.state_dir) if request.state_dir else state_root(os.environ) / "hosts" / name)
    daemon = _start_daemon(request, spec, connection, folder, stack)
    say(f"host {name} joins {connection.url}")
    say_where_it_goes(spec.checkpoint, folder.resolve())
    leave = HostLeave(spec, name, daemon)
    session = _Session(connection, daemon, leave)
    stack.callback(lambda: settle_memory(daemon, spec, session.state, has_left=leave.has_left, again=session.again))
    session.spec, session.submission = spec, submission
    return session


def _meet(request: RunRequest, spec: JobSpec, stack: ExitStack, signals: EndSignals) -> _Session:
    """Several hosts without a running supervisor: it comes up where the rendezvous address is, the others join it."""
    token = common_token(request, os.environ)
    request = msgspec.structs.replace(request, host_id=claim_host_id(request, os.environ, stack))
    host, _, port = request.rendezvous.rpartition(":")
    url = f"http://{request.rendezvous}"
    connection = Connection(url, token, None)
    supervisor: KeptSupervisor | None = None
    here = request.node_rank == 0 if request.node_rank is not None else this_host.is_here(host)
    if here:
        address = this_host.listen_address(host)
        try:  # before the job's folder is taken: that is for one node of this machine
            listener = bind_listener(address, int(port))
        except PortInUse:
            if request.node_rank == 0:
                raise
            here = False  # another run on this machine was first
    if here:
        folder = make_state_dir(_folder_of_meeting(request, stack) / "supervisor")
        supervisor = KeptSupervisor(folder, host=address, token=token, listener=listener)
        stack.callback(supervisor.stop)
        supervisor.start()
        say(f"supervisor of job {request.job} at {url}")
        if not this_host.is_loopback_name(host):
            say("no TLS between the hosts: whoever listens on their network can read the token")
    else:
        _await_supervisor(connection, signals)
    session = _join(request, spec, connection, stack)
    session.supervisor = supervisor if here else None
    if here and session.leave is not None:
        session.leave.keeps_supervisor(host.strip("[]"), port, folder)
    session.linger = here
    return session


def _folder_of_meeting(request: RunRequest, stack: ExitStack) -> Path:
    if request.state_dir:
        return Path(request.state_dir)
    home = take(request.job, os.environ)
    stack.callback(home.close)
    return home.path


def _await_supervisor(connection: Connection, signals: EndSignals) -> None:
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    say(f"waiting for the supervisor at {connection.url}")
    with _client(connection) as client:
        while True:
            try:
                client.items("/v1/hosts")
                return
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
            signals.check()
            time.sleep(RENDEZVOUS_RETRY_S)


def _start_daemon(
    request: RunRequest, spec: JobSpec, connection: Connection, folder: Path, stack: ExitStack
) -> HostProcess:
    """What an earlier run left in its memory outlives this one too, until somebody knows better."""
    token_file = connection.token_file or keep_token(folder.parent / f"{folder.name}.token", connection.token)
    daemon = HostProcess(
        host_id=request.host_id or this_host.host_id(),
        state_dir=folder,
        supervisor_url=connection.urls,
        token_file=token_file,
        address=request.local_addr or _own_address(request, connection),
        report_interval_s=OWN_HOST_REPORT_INTERVAL_S,
        warm_nproc=0 if spec.env else spec.nproc_per_node,  # while the job is being submitted
        environ=_daemon_environment(request),
    )
    daemon.keeps_segments = True
    stack.callback(daemon.stop)
    daemon.start()
    return daemon


def _own_address(request: RunRequest, connection: Connection) -> str:
    """The IP by which other hosts reach this one."""
    host = request.rendezvous.rpartition(":")[0]
    if host and this_host.listen_address(host) == this_host.EVERYWHERE:  # its name means 127.0.1.1 to itself
        return this_host.address_towards(this_host.BEYOND)
    return this_host.address_towards(connection.url)


def _daemon_environment(request: RunRequest) -> dict[str, str]:
    """That of this process, and the checkpoint settings of the host, for its engine and its workers."""
    settings = dict(request.engine_environment)
    if CONFIG_VARIABLE in settings:
        settings[CONFIG_VARIABLE] = str(Path(settings[CONFIG_VARIABLE]).resolve())
    return {**os.environ, **settings, **explicit(os.environ, request.env)}


def _with_environment(spec: JobSpec, request: RunRequest, token: str) -> JobSpec:
    """With this user's variables, for daemons that were started elsewhere. A daemon of this run has them all."""
    forwarded = select(os.environ, request.env)
    if forwarded.secret:
        say(f"secret variables, encrypted for the hosts: {', '.join(sorted(forwarded.secret))}")
    return msgspec.structs.replace(
        spec, user_env=forwarded.plain, sealed_env=seal(forwarded.secret, secret=token, job=spec.job)
    )


def _check_script(request: RunRequest) -> None:
    if request.program:
        try:
            find_program(request.argv[0], Path.cwd(), os.environ)
        except NotFound as error:
            raise UsageError(error.message, hint=error.hint) from error
        return
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
        job=request.job or default_job_name(request, str(Path.cwd())),
        argv=request.argv,
        workdir=str(Path.cwd()),
        nnodes=request.nnodes,
        nproc_per_node=this_host.workers_per_host(request.nproc_per_node),
        max_restarts=request.max_restarts,
        module=request.module,
        program=request.program,
        virtual_local_rank=request.virtual_local_rank,
        env={"ROLE_NAME": request.role} if request.role != "default" else {},
        log_dir=absolute(request.log_dir),
        checkpoint=msgspec.structs.replace(
            checkpoint, disk_dir=absolute(checkpoint.disk_dir), persistent_dir=absolute(checkpoint.persistent_dir)
        ),
        stop_grace_s=request.stop_grace_s,
        hang_timeout_s=request.hang_timeout_s,
    )


def _conclude(request: RunRequest, spec: JobSpec, job: Job, session: _Session, signals: EndSignals) -> int:
    state, logs, leave = JobState(job["state"]), session.logs(request, spec), session.leave
    again = f"flyball logs {spec.job}" + (f" --state-dir {request.state_dir}" if request.state_dir else "")
    where = f"logs: {again}" + (f" (in {logs})" if logs else "")
    if request.output == "json":
        print_json({**job, "log_dir": str(logs) if logs else None})
    if leave is not None and leave.has_begun and not state.ended:
        leave.say_outcome(job)
        return signals.exit_code
    if signals.count:
        say(f"job {spec.job} was stopped; {where}")
        return signals.exit_code
    if state is JobState.SUCCEEDED:
        restarts = job.get("restart_count", 0)
        after = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
        say(f"job {spec.job} succeeded{after}; {where}")
        return 0
    if state is JobState.STOPPED:
        say(f"job {spec.job} was stopped by an operator; {where}")
        return 1
    raise JobFailed(
        f"The job {spec.job} {state.value}: {job.get('message') or 'no message'}",
        hint=f"read the ranks' {where}",
    )
