"""How a command of `flyball run` begins on one machine: whether it goes on from an earlier run, and from where."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from flyball.cli.run.host_process import end_processes
from flyball.cli.run.run_folders import MOST_AT_ONCE, RunFolder, RunRecord, remove_segments
from flyball.cli.show.messages import announce
from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Again, JobSpec, JobState
from flyball.contracts.errors import Conflict, NotFound, Unreachable
from flyball.launch.launcher import RunRequest

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient
    from flyball.cli.run.going_on import Point
    from services.store.decisions.job_store import PastRun

DEFAULT_DISK_EVERY_S: Final = 600.0


class Submission(NamedTuple):
    """What the supervisor is told besides the job."""

    again: Again = Again.NO
    ended_at: float | None = None  # of the job that is begun again
    point: str = ""  # of a run that its database does not know: RUN:GENERATION:STEP

    @property
    def query(self) -> dict[str, str | float | None]:
        return {"again": self.again.value, "ended_at": self.ended_at, "point": self.point}


def with_default_tier(request: RunRequest, checkpoint: CheckpointSpec, folder: str) -> CheckpointSpec:
    """Checkpoints also go to the disk, unless the user said where, or does not want any."""
    if not request.keeps_on_disk or checkpoint.is_durable or not checkpoint.policy(Tier.MEMORY).is_on:
        return checkpoint
    return msgspec.structs.replace(checkpoint, disk_dir=folder, disk_every_s=DEFAULT_DISK_EVERY_S, disk_is_default=True)


def announce_disk_folder(checkpoint: CheckpointSpec, state_dir: Path) -> None:
    """The user named no place: say which it is on the host with this state folder."""
    if checkpoint.disk_is_default:
        every = f"{checkpoint.disk_every_s / 60:.0f} minutes"
        folder = checkpoint.disk_folder(state_dir)
        announce(f"checkpoints go to {folder} every {every}, and the newest at an end that is no success")


def begin(
    request: RunRequest,
    spec: JobSpec,
    home: RunFolder,
    *,
    host_id: str,
    environ: Mapping[str, str],
    check: Callable[[], None],
) -> Submission:
    """Look what an earlier run of the job left, and say what is done with it. What it left running is ended. `check`
    is asked again and again, and may raise. Raises NotFound if there is nothing and the user wants to resume, Conflict
    if it does not fit."""
    end_processes(home.host)
    past = _past(home)
    point = _newest(home, spec, past, host_id=host_id, environ=environ, must_know=not request.fresh, check=check)
    if request.fresh:
        _announce_restart(home, spec, point)
        remove_segments(home.path, environ)
        shutil.rmtree(home.checkpoints, ignore_errors=True)
        return Submission(Again.FRESH)
    if point is None:
        if request.resume:
            raise NotFound(
                f"Job {home.job} has left no checkpoint to go on from in {home.path}"
                + (f", {spec.checkpoint.persistent_dir}." if spec.checkpoint.persistent_dir else "."),
                hint="leave --resume out to start from the beginning",
            )
        return Submission(Again.FRESH if past else Again.NO)
    _check_fit(request, spec, home, point)
    said = f"going on from step {point.step} ({point.how}), written by {_who(home.before, past, point)}"
    announce(f"{said}; --fresh starts anew")
    if past is not None and past.run == point.run:
        return Submission(Again.RESUME)
    return Submission(Again.RESUME, point=f"{point.run}:{point.generation}:{point.step}")


def begin_at(client: ApiClient, request: RunRequest, spec: JobSpec) -> tuple[JobSpec, Submission]:
    """At a cluster's supervisor: a job of this name that has ended goes on, one that runs is joined. A name that the
    user did not give is not joined: another run of the same command gets another name. Raises NotFound."""
    for number in range(1, MOST_AT_ONCE + 1):
        name = spec.job if number == 1 else f"{spec.job[:59]}-{number}"
        try:
            known = client.get(f"/v1/jobs/{name}")
        except NotFound:
            if request.resume:
                raise
            known = None
        found = msgspec.structs.replace(spec, job=name)
        if known is None:
            return found, Submission()
        if JobState(known["state"]).ended:
            return found, _again_at(client, request, found, known)
        if request.job:
            return spec, Submission()
        announce(f"job {name} is running already; this is another one")
    raise Conflict(f"Job {spec.job} is running {MOST_AT_ONCE} times.", hint="give this one a name with --job NAME")


def _again_at(client: ApiClient, request: RunRequest, spec: JobSpec, known: Mapping[str, Any]) -> Submission:
    """One of several hosts that ask at once opens the job again, the others join it."""
    ended_at, how = known["ended_at"], str(known["state"])
    is_kept = spec.checkpoint.is_durable and not spec.checkpoint.disk_is_default
    nothing_left = JobState(how) is JobState.SUCCEEDED and not is_kept
    if request.fresh or nothing_left:
        announce(f"job {spec.job} {how} before; another run of it starts anew")
        return Submission(Again.FRESH, ended_at)
    announce(f"job {spec.job} {how} before, and goes on from its newest checkpoint; --fresh starts anew")
    return Submission(Again.RESUME, ended_at)


def record_of(request: RunRequest, spec: JobSpec, arguments: tuple[str, ...], *, host_id: str) -> RunRecord:
    """What a later command must know of this one."""
    return RunRecord(
        job=spec.job,
        arguments=arguments,
        workdir=spec.workdir,
        script=spec.argv[0],
        world_size=spec.world_size,
        host_id=host_id,
        started_at=SystemClock().wall_s(),
        state_dir=str(Path(request.state_dir).resolve()) if request.state_dir else "",
    )


def _past(home: RunFolder) -> PastRun | None:
    """What the folder's database says; of a job whose processes were all killed, that it has ended."""
    if not (home.path / "supervisor").exists():
        return None
    from flyball.cli.run.going_on import open_jobs  # SQLAlchemy: not before the first start of a job

    with open_jobs(home.path) as store:
        if store is not None:
            store.record_killed(home.job, SystemClock().wall_s())
        return store.past(home.job) if store is not None else None


def _newest(
    home: RunFolder,
    spec: JobSpec,
    past: PastRun | None,
    *,
    host_id: str,
    environ: Mapping[str, str],
    must_know: bool,
    check: Callable[[], None],
) -> Point | None:
    """Of the run that the database knows; else of the newest other one in the places that the user named. Raises
    Unreachable if there is none, one of the places could not be read, and one `must_know`: to begin anew for that
    would lose all that it has."""
    checkpoint = spec.checkpoint
    disk = checkpoint.disk_dir if not checkpoint.disk_is_default or Path(checkpoint.disk_dir).exists() else ""
    if past is None and not any((disk, checkpoint.persistent_dir)):
        return None  # and nothing is imported that could read it
    from flyball.cli.run.going_on import LeftCheckpoints, other_runs

    unread: list[str] = []
    runs = [past.run] if past else []
    runs += [run for run in other_runs(home.job, spec.checkpoint, host_id, environ) if run not in runs]
    for run in runs:
        check()
        lineage = past.lineage if past and past.run == run else ()
        left = LeftCheckpoints(home, spec.checkpoint, host_id=host_id, run=run, lineage=lineage, environ=environ)
        point = left.verified(check=check)
        if point is not None:
            return point
        unread += left.unread
    if unread and must_know:
        raise Unreachable(
            f"What job {home.job} has left could not be looked at: {unread[0]}.",
            hint="give the same command again when it can be read, or train anew with --fresh",
        )
    return None


def _check_fit(request: RunRequest, spec: JobSpec, home: RunFolder, point: Point) -> None:
    before = home.before
    if before is not None and before.script != spec.argv[0] and not request.resume:
        raise Conflict(
            f"Job {home.job} has checkpoints of another script: {before.script}.",
            hint="name this one otherwise with --job, train anew with --fresh, or go on all the same with --resume",
        )
    if point.world_size != spec.world_size:
        raise Conflict(
            f"Step {point.step} of job {home.job} was saved by {point.world_size} ranks; {spec.world_size} are to run.",
            hint="run it with as many ranks as before, train anew with --fresh, or choose another name with --job",
        )


def _announce_restart(home: RunFolder, spec: JobSpec, point: Point | None) -> None:
    if point is None:
        return
    from flyball.cli.run.going_on import DURABLE

    named = [spec.checkpoint.disk_dir] if not spec.checkpoint.disk_is_default else []
    kept = [place for place in (*named, spec.checkpoint.persistent_dir) if place]
    if point.tier in DURABLE and kept:
        announce(f"starting anew; step {point.step} of the run before stays in {', '.join(kept)}")
    else:
        announce(f"starting anew; step {point.step} of the run before is removed")


def _who(before: RunRecord | None, past: PastRun | None, point: Point) -> str:
    saved = f"at {_clock(point.committed_at)}" if point.committed_at else ""
    if past is None or before is None:
        return f"run {point.run} {saved}".rstrip()
    if before.state == "running":
        return f"a run that was killed, {saved}".rstrip(", ")
    ended = f" at {_clock(before.ended_at)}" if before.ended_at else ""
    words = {"succeeded": "succeeded", "failed": "failed", "stopped": "was stopped"}
    return f"the run that {words.get(before.state, 'ended')}{ended}"


def _clock(at: float) -> str:
    moment = datetime.fromtimestamp(at).astimezone()
    today = datetime.fromtimestamp(SystemClock().wall_s()).astimezone().date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%Y-%m-%d %H:%M}"
