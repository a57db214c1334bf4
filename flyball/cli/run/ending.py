"""End `flyball run`: save the newest step to disk before its memory is freed, and print the command that resumes."""

from __future__ import annotations

import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ckpt_engine.format.shard_names import parse_step_folder
from flyball.cli.run.host_process import HostProcess
from flyball.cli.run.run_folders import RunFolder, RunRecord, holds_memory
from flyball.cli.show.messages import announce
from flyball.cli.signals import EndSignals
from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import IN_MEMORY_ALONE, JobSpec, JobState
from flyball.contracts.errors import FlyballError
from flyball.contracts.on_host.engine_wire import ENGINE_SOCKET, Flush
from flyball.launch.launcher import RunRequest

if TYPE_CHECKING:
    from flyball.cli.run.job_watch import Job
    from flyball.cli.run.resume_points import JobCheckpoints, ResumePoint
    from services.store.decisions.job_store import PastRun

FLUSH_WITHIN_S: Final = 50.0
MIN_FLUSH_S: Final = 1.0
END_MARGIN_S: Final = 4.0  # before a batch system's SIGKILL: for the end of daemon and engine
_LOOK_INTERVAL_S: Final = 0.1


class Ending:
    """The end of a run on one machine, however it comes about. Call `run` before stopping the daemon."""

    def __init__(
        self,
        home: RunFolder,
        spec: JobSpec,
        record: RunRecord,
        daemon: HostProcess,
        signals: EndSignals,
        *,
        environ: Mapping[str, str],
    ) -> None:
        self.state: JobState | None = None  # how the job ended; None if the command failed first
        self.is_in_memory_alone = False  # it succeeded, and its store has not the newest step
        self._home = home
        self._spec = spec
        self._record = record
        self._daemon = daemon
        self._signals = signals
        self._environ = environ

    def run(self) -> None:
        """Write the newest step to disk if it is not there, and keep memory that holds the only copy."""
        ended = self.state if self.state and self.state.ended else None
        state = ended.value if ended else "stopped" if self._signals.count else "failed"
        # First, because the rest may fail (full disk).
        self._daemon.keeps_segments = ended is not JobState.SUCCEEDED or self.is_in_memory_alone
        try:
            self._home.write(msgspec.structs.replace(self._record, state=state, ended_at=SystemClock().wall_s()))
        except OSError as error:
            announce(f"cannot record the job's end in {self._home.path}: {error}")
        if ended is JobState.SUCCEEDED:
            if self.is_in_memory_alone:
                self._announce_kept()
            if self._spec.checkpoint.disk_is_default:
                shutil.rmtree(self._home.checkpoints, ignore_errors=True)
            return
        try:
            self._save(has_ended=ended is not None)
        except (FlyballError, OSError) as error:
            announce(f"cannot read the job's checkpoints: {error}; its memory is kept")

    def _announce_kept(self) -> None:
        """The job succeeded, and its newest step is in this machine's memory alone."""
        try:
            newest = self._find_checkpoints().newest()
        except (FlyballError, OSError) as error:
            announce(f"cannot read the job's checkpoints: {error}; its memory is kept")
            return
        if newest is not None:
            self._announce_step(newest, "stays in this machine's memory")

    def _save(self, *, has_ended: bool) -> None:
        found = self._find_checkpoints()
        if found.newest() is None:
            if unread := found.unread_memory:
                announce(f"cannot read the job's memory, which is kept: {unread[0]}")
            else:  # the job never attached, or saved nothing
                self._daemon.keeps_segments = False
            return
        if self._signals.count > 1:
            self._daemon.kill()
            self._announce_newest(self._find_checkpoints(), hasty=True)
            return
        if not has_ended:
            self._daemon.kill(except_engine=True)
        found = self._find_checkpoints()
        if self._spec.checkpoint.is_durable and self._is_behind(found):
            self._flush()
            found = self._find_checkpoints()
        self._announce_newest(found)

    def _is_behind(self, found: JobCheckpoints) -> bool:
        """Whether disk and store lack the newest step."""
        from flyball.cli.run.resume_points import DURABLE

        newest, durable = found.newest(), found.newest(DURABLE)
        return newest is not None and (durable is None or durable.step < newest.step)

    def _announce_newest(self, found: JobCheckpoints, *, hasty: bool = False) -> None:
        """Announce where the newest step is. Free the memory only if a verified copy is on disk or in a store."""
        from flyball.cli.run.resume_points import DURABLE, MEMORY

        newest, durable = found.newest(), None if hasty else found.verified(DURABLE)
        if newest is None:
            return
        if durable is not None and durable.step >= newest.step and durable.verified:
            self._daemon.keeps_segments = bool(found.unread_memory)
            self._announce_step(durable, f"is in {self._place(durable)} (verified)")
        elif found.newest(MEMORY) == newest:
            why = "" if hasty else f" and {self._disk_status(newest, durable)}"
            self._announce_step(newest, f"stays in this machine's memory{why}")
        else:
            self._announce_step(newest, f"is in {self._place(newest)} (not verified)")

    def _disk_status(self, newest: ResumePoint, durable: ResumePoint | None) -> str:
        """Why the newest step is not only on disk."""
        if not self._spec.checkpoint.is_durable:
            return "is not on disk (no disk tier)"
        if durable is None:
            return f"could not be written to {self._spec.checkpoint.disk_dir or self._spec.checkpoint.persistent_dir}"
        if durable.step >= newest.step:
            return f"is also in {self._place(durable)}, where there was no time to verify it"
        return f"could not be written to disk; step {durable.step} is in {self._place(durable)}"

    def _place(self, point: ResumePoint) -> str:
        checkpoint = self._spec.checkpoint
        return checkpoint.persistent_dir if point.tier.value == "persistent" else checkpoint.disk_dir

    def _announce_step(self, point: ResumePoint, where: str) -> None:
        words = ["flyball", "run", *(["--state-dir", self._record.state_dir] if self._record.state_dir else [])]
        command = shlex.join([*words, "--resume", self._spec.job])
        announce(f"step {point.step} of job {self._spec.job} {where}; resume with: {command}")

    def _find_checkpoints(self) -> JobCheckpoints:
        from flyball.cli.run.resume_points import JobCheckpoints

        past = self._past()
        return JobCheckpoints(
            self._home,
            self._spec.checkpoint,
            host_id=self._daemon.host_id,
            run=past.run if past else "",
            lineage=past.lineage if past else (),
            environ=self._environ,
        )

    def _past(self) -> PastRun | None:
        from flyball.cli.run.resume_points import open_jobs

        with open_jobs(self._home.path) as store:
            return store.past(self._spec.job) if store is not None else None

    def _flush(self) -> None:
        """Have the engine write its newest recovery point. A second signal ends the wait."""
        within_s = min(FLUSH_WITHIN_S, max(MIN_FLUSH_S, self._signals.left_s - END_MARGIN_S))
        announce(
            f"writing the newest step of job {self._spec.job} to disk, for at most {within_s:.0f} s "
            "(Ctrl-C again: end at once)"
        )
        import asyncio

        from host_daemon.engine.engine_client import EngineClient

        client = EngineClient(self._home.host / ENGINE_SOCKET)
        request = Flush(self._spec.job, within_s, durable=True)
        failed: list[FlyballError] = []

        def ask() -> None:
            try:
                asyncio.run(client.ask(request, timeout_s=within_s + 2.0))
            except FlyballError as error:
                failed.append(error)

        asking = threading.Thread(target=ask, name="last-flush", daemon=True)
        asking.start()
        while asking.is_alive() and self._signals.count <= 1:
            asking.join(_LOOK_INTERVAL_S)
        if failed:
            announce(f"the newest step could not be written: {failed[0].message}")


# --- several hosts ----------------------------------------------------------------------------------------------------


def is_in_memory_alone(job: Job) -> bool:
    """Whether a job succeeded whose store could not be written: its record says so."""
    return job["state"] == JobState.SUCCEEDED and IN_MEMORY_ALONE in (job.get("message") or "")


def settle_memory(daemon: HostProcess, spec: JobSpec, job: Job | None, *, has_left: bool, command: str) -> None:
    """Before the daemon of one of several hosts stops, decide whether its memory outlives it.

    It does if the job failed, its store could not be written, or its end is unknown, and steps are still in memory.
    Otherwise the engines have already written them to disk or freed them. `job`: None if its end is unknown.
    """
    state = JobState(job["state"]) if job is not None else None
    is_stored = state is JobState.SUCCEEDED and job is not None and not is_in_memory_alone(job)
    is_over = is_stored or (state is JobState.STOPPED and not spec.checkpoint.is_durable)
    daemon.keeps_segments = not (is_over or has_left) and holds_memory(daemon.segments_prefix)
    if daemon.keeps_segments:
        held = held_in_memory(daemon.segments_prefix, spec.job, daemon.host_id)
        free = f"free them with: flyball ckpt rm --job {spec.job} --memory"
        announce(f"host {daemon.host_id} keeps {held} of job {spec.job} in memory; {free}")
        if state is None:
            command = f"(only if the supervisor comes back with its data) {command}"
        announce(f"resume, on each host, with: {command}")
    elif not has_left:
        announce_kept_step(spec, job, daemon.host_id, daemon.state_dir, command=command)


def held_in_memory(prefix: str, job: str, host_id: str) -> str:
    """What this host's memory has of a job, in words: of which newest step, and whether it is all of it."""
    from ckpt_engine.inspect.copy_places import SlotPlace
    from ckpt_engine.inspect.inventory import CopyInventory

    found = CopyInventory(job, [SlotPlace(tier, prefix, job, host_id) for tier in (Tier.MEMORY, Tier.PEER)])
    newest = max(found.steps, key=lambda listing: (listing.complete, listing.step), default=None)
    if newest is None:
        return "slots without a complete shard"
    if newest.complete:
        return f"step {newest.step} (all {newest.world_size} ranks)"
    ranks = sorted({rank for share in newest.tiers for rank in share.ranks})
    shards = f"the shard of rank {ranks[0]}" if len(ranks) == 1 else f"the shards of ranks {', '.join(map(str, ranks))}"
    return f"{shards}, of {newest.world_size}, of step {newest.step} (useless without those of the other hosts)"


def announce_kept_step(spec: JobSpec, job: Job | None, host_id: str, state_dir: Path | None, *, command: str) -> None:
    """On one of several hosts, announce where the job's newest step is, if it did not succeed: not with a host whose
    ranks have moved."""
    checkpoint = spec.checkpoint
    if job is None or JobState(job["state"]) not in (JobState.FAILED, JobState.STOPPED) or not checkpoint.is_durable:
        return
    disk = checkpoint.disk_folder(state_dir.resolve()) if state_dir else checkpoint.disk_dir
    step = _newest_step(Path(disk) / host_id / spec.job) if checkpoint.policy(Tier.DISK).is_on else None
    hosts = sorted({str(rank["host_id"]) for rank in job.get("ranks", ())})
    if hosts and host_id not in hosts and checkpoint.policy(Tier.DISK).is_on and job["newest_step"] >= 0:
        newest = f"the newest step of job {spec.job}, {job['newest_step']}, is on the disks of {', '.join(hosts)}"
        announce(f"{newest}, where its ranks were; resume, on each of them, with: {command}")
    elif step is not None:
        announce(f"step {step} of job {spec.job} is in {disk}; resume, on each host, with: {command}")
    elif checkpoint.persistent_dir:
        place = checkpoint.persistent_dir
        announce(f"the newest step of job {spec.job} is in {place}; resume, on each host, with: {command}")


def resume_command(request: RunRequest, arguments: Sequence[str]) -> str:
    """The command that resumes: the same, without a flag that would start over."""
    flags = arguments[: len(arguments) - len(request.argv)]
    return shlex.join(["flyball", "run", *(flag for flag in flags if flag != "--fresh"), *request.argv])


def _newest_step(folder: Path) -> int | None:
    """The newest step in a folder of a job's runs: of its newest run and generation."""
    steps = [
        (step.parent.parent.name, found)
        for step in folder.glob("*/g*/step*")
        if (found := parse_step_folder(f"{step.parent.name}/{step.name}")) and any(step.glob("rank*.manifest"))
    ]
    return max(steps)[1][1] if steps else None
