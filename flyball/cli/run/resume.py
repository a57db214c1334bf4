"""Decide how `flyball run` starts a job: from scratch, or from which checkpoint of an earlier run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from flyball.contracts.errors import Conflict, NotFound, NothingVerifies, Unreachable
from flyball.launch.checkpoint_flags import DEFAULT_EVERY_S
from flyball.launch.launcher import RunRequest

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient
    from flyball.cli.run.resume_points import ResumePoint
    from services.store.decisions.job_store import PastRun

DAMAGED_SHOWN: Final = 4
END_WITHIN_S: Final = 300.0  # for a job of this name that is ending
LOOK_INTERVAL_S: Final = 0.25


class Submission(NamedTuple):
    """Data for the supervisor, sent along with the job."""

    again: Again = Again.NO
    ended_at: float | None = None  # of the ended job that is started again
    point: str = ""  # RUN:GENERATION:STEP:RANKS, for a run that the supervisor's database does not know

    @property
    def query(self) -> dict[str, str | float | None]:
        return {"again": self.again.value, "ended_at": self.ended_at, "point": self.point}


def with_default_tier(request: RunRequest, checkpoint: CheckpointSpec, folder: str) -> CheckpointSpec:
    """Add a disk tier in `folder`, unless the user chose a durable tier or switched checkpoints off."""
    if not request.keeps_on_disk or checkpoint.is_durable or not checkpoint.policy(Tier.MEMORY).is_on:
        return checkpoint
    return msgspec.structs.replace(checkpoint, disk_dir=folder, disk_every_s=DEFAULT_EVERY_S, disk_is_default=True)


def where_checkpoints_go(checkpoint: CheckpointSpec, state_dir: Path) -> str:
    """Says where they go on the host with this state folder, if the user did not choose that."""
    if not checkpoint.disk_is_default:
        return ""
    every = f"{checkpoint.disk_every_s / 60:.0f} minutes"
    folder = checkpoint.disk_folder(state_dir)
    return f"checkpoints go to {folder} every {every}, and at the end unless the job succeeds"


def prepare_locally(
    request: RunRequest,
    spec: JobSpec,
    home: RunFolder,
    *,
    host_id: str,
    environ: Mapping[str, str],
    check: Callable[[], None],
) -> Submission:
    """End what an earlier run of the job left running, and decide whether to resume from its checkpoints.

    `check` is called often and may raise. Raises NotFound if the user wants to resume and there is nothing, Conflict if
    the checkpoints do not fit the job.
    """
    end_processes(home.host)
    past = _past(home)
    point = _newest(home, spec, past, host_id=host_id, environ=environ, must_know=not request.fresh, check=check)
    if request.fresh:
        _announce_fresh_start(home, spec, point)
        remove_segments(home.path, environ)
        shutil.rmtree(home.checkpoints, ignore_errors=True)
        return Submission(Again.FRESH)
    if point is None:
        if request.resume:
            raise NotFound(
                f"Job {home.job} has no checkpoint to resume from in {home.path}"
                + (f" or {spec.checkpoint.persistent_dir}." if spec.checkpoint.persistent_dir else "."),
                hint="leave out --resume to start from the beginning",
            )
        return Submission(Again.FRESH if past else Again.NO)
    _check_fit(request, spec, home)
    announce(
        f"resuming from step {point.step} ({point.how}), saved by {_saved_by(home.before, past, point)} "
        f"{_resharding(point.world_size, spec.world_size)}(--fresh starts over)"
    )
    if past is not None and past.run == point.run and not point.newer_damaged:
        return Submission(Again.RESUME)
    return Submission(Again.RESUME, point=f"{point.run}:{point.generation}:{point.step}:{point.world_size}")


def prepare_at_supervisor(
    client: ApiClient, request: RunRequest, spec: JobSpec, check: Callable[[], None]
) -> tuple[JobSpec, Submission]:
    """Decide how to start the job at a cluster's supervisor: resume an ended job of this name, join a running one.

    Under a generated name, join nothing: another run of the same command gets another name. Raises NotFound, and what
    `check` does while it waits.
    """
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
        if JobState(known["state"]).ending and (request.job or request.resume):
            known = _await_end(client, name, known, check)
        if JobState(known["state"]).ended:
            return found, _again_at(client, request, found, known)
        if request.job:
            return spec, Submission()
        announce(f"job {name} is already running; this is another one")
    raise Conflict(
        f"Job {spec.job} is already running {MOST_AT_ONCE} times.", hint="give this one a name with --job NAME"
    )


def _await_end(client: ApiClient, name: str, known: Mapping[str, Any], check: Callable[[], None]) -> Mapping[str, Any]:
    """Wait until a job that is ending has ended. Raises Conflict if that takes too long, and what `check` does."""
    announce(f"job {name} is {known['state']}: waiting until its workers are gone")
    until_s = time.monotonic() + END_WITHIN_S
    while not JobState(known["state"]).ended:
        if time.monotonic() > until_s:
            raise Conflict(
                f"Job {name} is still {known['state']} after {END_WITHIN_S:.0f} s.",
                hint=f"wait with `flyball stop {name}`, then run this again, or give this run another name with --job",
            )
        check()
        time.sleep(LOOK_INTERVAL_S)
        known = client.get(f"/v1/jobs/{name}")
    return known


def _again_at(client: ApiClient, request: RunRequest, spec: JobSpec, known: Mapping[str, Any]) -> Submission:
    """Start an ended job again. If several hosts do so at once, one starts it and the others join."""
    ended_at, how = known["ended_at"], str(known["state"])
    is_kept = spec.checkpoint.is_durable and not spec.checkpoint.disk_is_default
    nothing_left = JobState(how) is JobState.SUCCEEDED and not is_kept
    if request.fresh or nothing_left:
        announce(f"job {spec.job} {_ended_how(how)} before; starting it over")
        return Submission(Again.FRESH, ended_at)
    others = _resharding(int(known["world_size"]), spec.world_size)
    announce(
        f"job {spec.job} {_ended_how(how)} before; resuming from its newest checkpoint {others}(--fresh starts over)"
    )
    return Submission(Again.RESUME, ended_at)


def record_of(request: RunRequest, spec: JobSpec, arguments: tuple[str, ...], *, host_id: str) -> RunRecord:
    """The record that lets a later command resume this one."""
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
    """The earlier run in the folder's database. If all its processes were killed, record its end there first."""
    if not (home.path / "supervisor").exists():
        return None
    from flyball.cli.run.resume_points import open_jobs  # imports SQLAlchemy, which a first run does not need yet

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
) -> ResumePoint | None:
    """The newest verified point of the run in the database, else of the newest other run in the user's tiers.

    Newer steps that do not verify are announced. If there is none, and `must_know` is set, raises Unreachable if a tier
    was unreadable, and NothingVerifies if there are steps, all damaged: starting over would lose them.
    """
    checkpoint = spec.checkpoint
    disk = checkpoint.disk_dir if not checkpoint.disk_is_default or Path(checkpoint.disk_dir).exists() else ""
    if past is None and not any((disk, checkpoint.persistent_dir)):
        return None  # without importing what could read checkpoints
    from flyball.cli.run.resume_points import JobCheckpoints, other_runs

    unread: list[str] = []
    damaged: list[tuple[int, str]] = []
    runs = [past.run] if past else []
    runs += [run for run in other_runs(home.job, spec.checkpoint, host_id, environ) if run not in runs]
    for run in runs:
        check()
        lineage = past.lineage if past and past.run == run else ()
        left = JobCheckpoints(home, spec.checkpoint, host_id=host_id, run=run, lineage=lineage, environ=environ)
        point = left.verified(check=check)
        damaged += [(step, why) for step, why in left.damaged.items() if point is None or step > point.step]
        if point is not None:
            _announce_damaged(damaged)
            return replace(point, newer_damaged=bool(damaged))
        unread += left.unread + left.unread_bytes
    if unread and must_know:
        raise Unreachable(
            f"The checkpoints of job {home.job} cannot be read: {unread[0]}.",
            hint="run the same command again once they can be read, or start over with --fresh",
        )
    if damaged and must_know:
        count = f"{len(damaged)} step{'' if len(damaged) == 1 else 's'} found, none verifies"
        raise NothingVerifies(
            f"Job {home.job}: {count}: {_listed(damaged)}.",
            hint="`--fresh` starts over; nothing was changed, so a backup of these files may still help",
        )
    return None


def _announce_damaged(damaged: Sequence[tuple[int, str]]) -> None:
    if damaged:
        announce(f"newer checkpoints do not verify and are not used: {_listed(damaged)}")


def _listed(damaged: Sequence[tuple[int, str]]) -> str:
    """The newest damaged steps, each with a reason."""
    shown = "; ".join(f"step {step}: {why}" for step, why in damaged[:DAMAGED_SHOWN])
    return shown + ("; ..." if len(damaged) > DAMAGED_SHOWN else "")


def _check_fit(request: RunRequest, spec: JobSpec, home: RunFolder) -> None:
    before = home.before
    if before is not None and before.script != spec.argv[0] and not request.resume:
        raise Conflict(
            f"Job {home.job} has checkpoints of another script, {before.script}.",
            hint="choose another name with --job, start over with --fresh, or use them anyway with --resume",
        )


def _resharding(before: int, ranks: int) -> str:
    """What happens to the checkpoint if `before` ranks saved it. '' or ends with a space."""
    if before == ranks:
        return ""
    return f"on {before} rank{'' if before == 1 else 's'}, and resharded to {ranks} "


def _announce_fresh_start(home: RunFolder, spec: JobSpec, point: ResumePoint | None) -> None:
    if point is None:
        return
    from flyball.cli.run.resume_points import DURABLE

    named = [spec.checkpoint.disk_dir] if not spec.checkpoint.disk_is_default else []
    kept = [place for place in (*named, spec.checkpoint.persistent_dir) if place]
    if point.tier in DURABLE and kept:
        announce(f"starting over; step {point.step} of the previous run stays in {', '.join(kept)}")
    else:
        announce(f"starting over; step {point.step} of the previous run is removed")


def _ended_how(state: str) -> str:
    return {"succeeded": "succeeded", "failed": "failed", "stopped": "was stopped"}.get(state, "ended")


def _saved_by(before: RunRecord | None, past: PastRun | None, point: ResumePoint) -> str:
    saved = f"at {_clock(point.committed_at)}" if point.committed_at else ""
    if past is None or before is None:
        return f"run {point.run} {saved}".rstrip()
    if before.state == "running":
        return f"a run that was killed, {saved}".rstrip(", ")
    ended = f" at {_clock(before.ended_at)}" if before.ended_at else ""
    return f"the run that {_ended_how(before.state)}{ended}"


def _clock(at: float) -> str:
    moment = datetime.fromtimestamp(at).astimezone()
    today = datetime.fromtimestamp(SystemClock().wall_s()).astimezone().date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%Y-%m-%d %H:%M}"
