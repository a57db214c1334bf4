"""The end of `flyball run` on one host of several: what stays in memory or on disk, and the command that goes on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ckpt_engine.format.shard_names import parse_step_folder
from flyball.cli.run.host_process import HostProcess
from flyball.cli.run.run_folders import holds_memory
from flyball.cli.show.messages import announce
from flyball.contracts.checkpoints import Tier
from flyball.contracts.cluster import JobSpec, JobState
from flyball.launch.launcher import RunRequest


def settle_memory(daemon: HostProcess, spec: JobSpec, state: JobState | None, *, has_left: bool, again: str) -> None:
    """The end of one host of several, before its daemon is stopped: what its engine left in memory, of a job that
    failed or whose end is not known, outlives it. The engines have freed, or written to disk, that of other jobs."""
    is_over = state is JobState.SUCCEEDED or (state is JobState.STOPPED and not spec.checkpoint.is_durable)
    daemon.keeps_segments = not (is_over or has_left) and holds_memory(daemon.segments_prefix)
    if daemon.keeps_segments:
        announce(
            f"what host {daemon.host_id} has in memory of job {spec.job} stays there, and the same command can go on "
            f"from it; free it with: flyball ckpt rm {spec.job} --memory"
        )
        announce(f"go on, on each host, with: {again}")
    elif not has_left:
        announce_kept_step(spec, state, daemon.host_id, daemon.state_dir, again=again)


def announce_kept_step(
    spec: JobSpec, state: JobState | None, host_id: str, state_dir: Path | None, *, again: str
) -> None:
    """Where one host of several has the newest step of a job that did not succeed, once its engine freed the memory."""
    checkpoint = spec.checkpoint
    if state not in (JobState.FAILED, JobState.STOPPED) or not checkpoint.is_durable:
        return
    disk = checkpoint.disk_folder(state_dir.resolve()) if state_dir else checkpoint.disk_dir
    step = _newest_step(Path(disk) / host_id / spec.job) if checkpoint.policy(Tier.DISK).is_on else None
    if step is not None:
        announce(f"step {step} of job {spec.job} is in {disk}; go on, on each host, with: {again}")
    elif checkpoint.persistent_dir:
        announce(
            f"the newest step of job {spec.job} is in {checkpoint.persistent_dir}; go on, on each host, with: {again}"
        )


def same_command(request: RunRequest, arguments: Sequence[str]) -> str:
    """What goes on: without a flag that would begin anew."""
    flags = arguments[: len(arguments) - len(request.argv)]
    return shlex.join(["flyball", "run", *(flag for flag in flags if flag != "--fresh"), *request.argv])


def _newest_step(folder: Path) -> int | None:
    """Of the job whose runs lie there. Generations and runs are counted on."""
    steps = [
        (step.parent.parent.name, found)
        for step in folder.glob("*/g*/step*")
        if (found := parse_step_folder(f"{step.parent.name}/{step.name}")) and any(step.glob("rank*.manifest"))
    ]
    return max(steps)[1][1] if steps else None
