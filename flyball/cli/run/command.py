"""`flyball run`: run a training script under supervision, in place of torchrun."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ckpt_engine.settings import read_config
from flyball.batch_step import is_batch_step, notice_s
from flyball.cli.policy_file import read_policy
from flyball.cli.reach import this_host
from flyball.cli.reach.places import SupervisorConnection, find_supervisor
from flyball.cli.run.embedded import KeptSupervisor
from flyball.cli.run.ending import Ending, is_in_memory_alone, resume_command
from flyball.cli.run.job_watch import Job
from flyball.cli.run.rendezvous import join, meet
from flyball.cli.run.resume import prepare_locally, record_of, where_checkpoints_go, with_default_tier
from flyball.cli.run.run_folders import RunFolder, claim_folder, find_run
from flyball.cli.run.session import Session, start_daemon
from flyball.cli.show.messages import announce, json_text
from flyball.cli.signals import EndSignals
from flyball.contracts.checkpoints import STATE_DIR_DISK
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.errors import (
    ConfigurationError,
    JobFailed,
    NotFound,
    NotStored,
    UsageError,
)
from flyball.launch.forwarded_environment import explicit
from flyball.launch.launch_grammar import help_text
from flyball.launch.launcher import RunRequest, default_job_name, parse_run
from flyball.programs import find_program

FILES_NEEDED = 128  # of command, supervisor and daemon, each
FILES_PER_WORKER = 8


def run(arguments: list[str]) -> int:
    """Run a job and return the exit code: 0 if it succeeded, 128 + n if signal n ended it. Raises FlyballError."""
    request = parse_run(arguments, os.environ, read_config)
    if request.help:
        sys.stdout.write(help_text(everything=request.help_all))
        return 0
    for notice in request.notices:
        announce(notice)
    if request.resume:
        request, arguments = _with_earlier_command(request, arguments)
    if is_batch_step(os.environ):
        request = msgspec.structs.replace(request, batch=True)
    if request.rendezvous and not request.job:  # all hosts of a rendezvous run the same command
        request = msgspec.structs.replace(request, job=default_job_name(request, str(Path.cwd())))
    _check_script(request)
    os.environ.update(request.tls.environment())  # for every client in this process, and for the daemon
    explicit(os.environ, request.env)  # report mistakes in --env before anything starts
    spec = _job_spec(request)
    _allow_files(spec.nproc_per_node)
    if request.supervisor or request.rendezvous:
        spec = msgspec.structs.replace(spec, checkpoint=with_default_tier(request, spec.checkpoint, STATE_DIR_DISK))
    with EndSignals(request.stop_signals, _notice_of(request)) as signals, ExitStack() as stack:
        if request.supervisor:
            session = join(request, spec, find_supervisor(os.environ, url=request.supervisor), stack, signals)
            session.away_limit_s = math.inf  # a cluster's supervisor comes back; until then, training goes on
        elif request.rendezvous:
            session = meet(request, spec, stack, signals)
        else:
            home = claim_folder(spec.job, os.environ, state_dir=request.state_dir)
            stack.callback(home.close)
            checkpoint = with_default_tier(request, spec.checkpoint, str(home.checkpoints))
            spec = msgspec.structs.replace(spec, job=home.job, checkpoint=checkpoint)
            session = _run_locally(request, spec, home, tuple(arguments), (stack, signals))
        session.resume_command = resume_command(request, arguments)
        spec = session.spec or spec
        job = session.follow(request, spec, signals, stack)
        if session.keeps_supervisor_of_others and JobState(job["state"]).ended:
            session.wait_for_other_hosts(signals)
    return _conclude(request, spec, job, session, signals)


def _allow_files(workers: int) -> None:
    """Raise this process's limit of open files as far as it needs, before anything has begun. Raises
    ConfigurationError."""
    need = FILES_NEEDED + FILES_PER_WORKER * workers
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= need:
        return
    if most != resource.RLIM_INFINITY and most < need:
        raise ConfigurationError(
            f"A process may open {most} files here, and `flyball run` needs {need} with {workers} workers.",
            hint=f"raise the limit (ulimit -n {max(4096, need)}), or have your system's administrator raise it",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, most))


def _run_locally(
    request: RunRequest,
    spec: JobSpec,
    home: RunFolder,
    arguments: tuple[str, ...],
    ending: tuple[ExitStack, EndSignals],
) -> Session:
    """Start a supervisor and a daemon that live as long as this job."""
    stack, signals = ending
    folder, host_id = home.path, request.host_id or (home.before.host_id if home.before else this_host.host_id())
    submission = prepare_locally(request, spec, home, host_id=host_id, environ=os.environ, check=signals.check)
    record = record_of(request, spec, arguments, host_id=host_id)
    home.write(record)
    supervisor = KeptSupervisor(folder / "supervisor", only_job=spec.job)
    stack.callback(supervisor.stop)
    connection = SupervisorConnection(supervisor.url, supervisor.token, supervisor.token_file)
    secret = f"/?token={supervisor.token}" if sys.stderr.isatty() else ""  # keep it out of a batch system's log
    announce(f"job {spec.job}; dashboard {supervisor.url}{secret}")
    announce(f"state and logs in {folder}")
    # Start the daemon first: it imports torch, which takes longest, while this process imports the supervisor.
    mine = msgspec.structs.replace(request, host_id=host_id)
    daemon = start_daemon(mine, spec, connection, home.host, stack)
    final = Ending(home, spec, record, daemon, signals, environ=os.environ)
    stack.callback(final.run)
    supervisor.start()
    session = Session(connection, daemon)
    session.supervisor, session.submission = supervisor, submission
    session.ending = final
    session.once_attached = where_checkpoints_go(spec.checkpoint, home.host)
    return session


def _with_earlier_command(request: RunRequest, arguments: list[str]) -> tuple[RunRequest, list[str]]:
    """For `--resume [JOB]`, combine the earlier run's command with this one's flags. With a script, change nothing."""
    if request.argv and (request.module or request.program or _runs(Path(request.argv[0]))):
        return request, arguments
    if request.supervisor:
        raise UsageError(
            "--resume JOB finds runs on this machine only, not those of a supervisor.",
            hint="run the same command as before: it resumes by itself",
        )
    if len(request.argv) > 1:
        raise UsageError(
            f"{request.argv[0]} is not a script, and --resume takes only one job.", hint="flyball run --resume JOB"
        )
    job = request.argv[0] if request.argv else request.job
    record = find_run(job, os.environ, state_dir=request.state_dir)
    try:
        os.chdir(record.workdir)
    except OSError as error:
        raise NotFound(
            f"Cannot enter the folder {record.workdir}, where job {record.job} ran: {error.strerror}.",
            hint=f"restore it, or name the script's new place: flyball run --resume --job {record.job} SCRIPT",
        ) from error
    flags = arguments[: len(arguments) - len(request.argv)]
    resumed = parse_run(flags, os.environ, read_config, before=record.arguments)
    state_dir = request.state_dir or record.state_dir
    resumed = msgspec.structs.replace(resumed, job=record.job, resume=True, state_dir=state_dir)
    return resumed, [*record.arguments]


def _notice_of(request: RunRequest) -> Callable[[], float] | None:
    """How long a batch system waits after its first SIGTERM, as a function; None outside of its steps."""
    if not request.batch:
        return None
    return lambda: request.notice_s or notice_s(os.environ, SystemClock().wall_s())


def _check_script(request: RunRequest) -> None:
    if request.program:
        try:
            find_program(request.argv[0], Path.cwd(), os.environ)
        except NotFound as error:
            raise UsageError(error.message, hint=error.hint) from error
        return
    script = Path(request.argv[0])
    if not request.module and not _runs(script):
        what = "is a folder without __main__.py" if script.is_dir() else "does not exist"
        raise UsageError(
            f"The script {script} {what}.", hint="give the path of a Python file, or -m and a module's name"
        )


def _runs(script: Path) -> bool:
    return script.is_file() or (script / "__main__.py").is_file()


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
        spares=request.spares,
        min_nodes=request.min_nnodes if request.min_nnodes < request.nnodes else 0,
        never_from_scratch=request.never_from_scratch,
        injectable=request.injectable,
        check_nodes=request.check_nodes,
        exclude_stragglers=request.exclude_stragglers,
        hang_timeout_s=request.hang_timeout_s,
        policy=read_policy(request.policy_file),
    )


def _conclude(request: RunRequest, spec: JobSpec, job: Job, session: Session, signals: EndSignals) -> int:
    state, logs, leave = JobState(job["state"]), session.logs(request, spec), session.leave
    state_dir = f" --state-dir {request.state_dir}" if request.state_dir else ""
    logs_command = f"flyball logs {spec.job}{state_dir}"
    where = f"logs: {logs_command}" + (f" (in {logs})" if logs else "")
    if request.output == "json":
        sys.stdout.write(json_text({**job, "log_dir": str(logs) if logs else None}))
    if leave is not None and leave.has_begun and not state.ended:
        leave.announce_outcome(job)
        return signals.exit_code
    if signals.count:
        how = "succeeded" if state.outcome is JobState.SUCCEEDED else "was stopped"
        announce(f"job {spec.job} {how}; {where}")
        return signals.exit_code
    if state.outcome is JobState.SUCCEEDED:
        if is_in_memory_alone(job):
            raise NotStored(
                f"The job {spec.job} succeeded, but its store was not written: {job['message']}",
                hint=f"the same command writes it, once the store can be written; or read it now: flyball ckpt restore "
                f"latest --job {spec.job}{state_dir} --to FOLDER",
            )
        restarts = job.get("restart_count", 0)
        after = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
        announce(f"job {spec.job} succeeded{after}; {where}")
        return 0
    if state.outcome is JobState.STOPPED:
        announce(f"job {spec.job} was stopped by an operator; {where}")
        return 1
    raise JobFailed(
        f"The job {spec.job} {state.value}: {job.get('message') or 'no message'}",
        hint=f"read the ranks' {where}",
    )
