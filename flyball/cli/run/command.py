"""`flyball run`: what a user types in place of torchrun."""

from __future__ import annotations

import math
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ckpt_engine.settings import read_config
from flyball.cli.reach import this_host
from flyball.cli.reach.places import SupervisorConnection, find_supervisor
from flyball.cli.run.beginning import announce_disk_folder, begin, record_of, with_default_tier
from flyball.cli.run.embedded import KeptSupervisor
from flyball.cli.run.ending import Ending
from flyball.cli.run.host_end import same_command
from flyball.cli.run.job_watch import Job
from flyball.cli.run.meeting import join, meet
from flyball.cli.run.run_folders import RunFolder, find_run, take
from flyball.cli.run.session import Session, start_daemon
from flyball.cli.show.messages import announce, print_json
from flyball.cli.signals import EndSignals
from flyball.contracts.checkpoints import STATE_DIR_DISK
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.errors import (
    JobFailed,
    NotFound,
    UsageError,
)
from flyball.launch.forwarded_environment import explicit
from flyball.launch.launch_grammar import help_text
from flyball.launch.launcher import RunRequest, default_job_name, parse_run
from flyball.programs import find_program


def run(arguments: list[str]) -> int:
    """The exit code of a job: 0 it succeeded, 1 it failed, 128 + n a signal ended it."""
    request = parse_run(arguments, os.environ, read_config)
    if request.help:
        sys.stdout.write(help_text())
        return 0
    for notice in request.notices:
        announce(notice)
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
            session = join(request, spec, find_supervisor(os.environ, url=request.supervisor), stack)
            session.away_limit_s = math.inf  # a cluster's supervisor comes back, and until then training goes on
        elif request.rendezvous:
            session = meet(request, spec, stack, signals)
        else:
            home = take(spec.job, os.environ, state_dir=request.state_dir)
            stack.callback(home.close)
            checkpoint = with_default_tier(request, spec.checkpoint, str(home.checkpoints))
            spec = msgspec.structs.replace(spec, job=home.job, checkpoint=checkpoint)
            session = _alone(request, spec, home, tuple(arguments), (stack, signals))
        session.again = same_command(request, arguments)
        spec = session.spec or spec
        job = session.follow(request, spec, signals, stack)
        if session.keeps_supervisor_of_others and JobState(job["state"]).ended:
            session.let_others_hear(signals)
    return _conclude(request, spec, job, session, signals)


def _alone(
    request: RunRequest,
    spec: JobSpec,
    home: RunFolder,
    arguments: tuple[str, ...],
    ending: tuple[ExitStack, EndSignals],
) -> Session:
    """Supervisor and daemon for the life of this one job."""
    stack, signals = ending
    folder, host_id = home.path, request.host_id or (home.before.host_id if home.before else this_host.host_id())
    submission = begin(request, spec, home, host_id=host_id, environ=os.environ, check=signals.check)
    record = record_of(request, spec, arguments, host_id=host_id)
    home.write(record)
    supervisor = KeptSupervisor(folder / "supervisor")
    stack.callback(supervisor.stop)
    connection = SupervisorConnection(supervisor.url, supervisor.token, supervisor.token_file)
    secret = f"/?token={supervisor.token}" if sys.stderr.isatty() else ""  # not into the log of a batch system
    announce(f"job {spec.job}; status page {supervisor.url}{secret}")
    announce(f"state and logs in {folder}")
    announce_disk_folder(spec.checkpoint, home.host)
    # The daemon first: it has torch imported, which takes longest, while this process imports the supervisor.
    mine = msgspec.structs.replace(request, host_id=host_id)
    daemon = start_daemon(mine, spec, connection, home.host, stack)
    final = Ending(home, spec, record, daemon, signals, environ=os.environ)
    stack.callback(final.run)
    supervisor.start()
    session = Session(connection, daemon)
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
        spares=request.max_nnodes - request.nnodes,
        never_from_scratch=request.never_from_scratch,
        hang_timeout_s=request.hang_timeout_s,
    )


def _conclude(request: RunRequest, spec: JobSpec, job: Job, session: Session, signals: EndSignals) -> int:
    state, logs, leave = JobState(job["state"]), session.logs(request, spec), session.leave
    again = f"flyball logs {spec.job}" + (f" --state-dir {request.state_dir}" if request.state_dir else "")
    where = f"logs: {again}" + (f" (in {logs})" if logs else "")
    if request.output == "json":
        print_json({**job, "log_dir": str(logs) if logs else None})
    if leave is not None and leave.has_begun and not state.ended:
        leave.announce_outcome(job)
        return signals.exit_code
    if signals.count:
        announce(f"job {spec.job} was stopped; {where}")
        return signals.exit_code
    if state is JobState.SUCCEEDED:
        restarts = job.get("restart_count", 0)
        after = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
        announce(f"job {spec.job} succeeded{after}; {where}")
        return 0
    if state is JobState.STOPPED:
        announce(f"job {spec.job} was stopped by an operator; {where}")
        return 1
    raise JobFailed(
        f"The job {spec.job} {state.value}: {job.get('message') or 'no message'}",
        hint=f"read the ranks' {where}",
    )
