"""How a command of `flyball run` ends on one machine: no memory is freed before what it holds is on disk, and what goes
on from there is said."""

from __future__ import annotations

import shlex
import shutil
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from flyball.cli.run.host_process import HostProcess
from flyball.cli.run.run_folders import RunFolder, RunRecord
from flyball.cli.show.messages import announce
from flyball.cli.signals import EndSignals
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.errors import FlyballError
from flyball.contracts.on_host.engine_wire import ENGINE_SOCKET, Flush

if TYPE_CHECKING:
    from flyball.cli.run.going_on import LeftCheckpoints, Point
    from services.store.decisions.job_store import PastRun

FLUSH_WITHIN_S: Final = 50.0
_LOOK_INTERVAL_S: Final = 0.1


class Ending:
    """What is done when the command ends, however that comes about. Call `run` before the daemon is stopped."""

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
        self.state: JobState | None = None  # how the job ended; None: the command failed before it did
        self._home = home
        self._spec = spec
        self._record = record
        self._daemon = daemon
        self._signals = signals
        self._environ = environ

    def run(self) -> None:
        """Bring the newest step to disk if it is not there, and leave in memory what is nowhere else."""
        ended = self.state if self.state and self.state.ended else None
        word = ended.value if ended else "stopped" if self._signals.count else "failed"
        self._daemon.keeps_segments = ended is not JobState.SUCCEEDED  # before all that can fail: the disk may be full
        try:
            self._home.write(msgspec.structs.replace(self._record, state=word, ended_at=SystemClock().wall_s()))
        except OSError as error:
            announce(f"the end of the job could not be written to {self._home.path}: {error}")
        if ended is JobState.SUCCEEDED:
            if self._spec.checkpoint.disk_is_default:
                shutil.rmtree(self._home.checkpoints, ignore_errors=True)
            return
        try:
            self._save(has_ended=ended is not None)
        except (FlyballError, OSError) as error:
            announce(f"what the job has left could not be looked at: {error}; its memory stays")

    def _save(self, *, has_ended: bool) -> None:
        left = self._look()
        if left.newest() is None:
            if unread := left.unread_memory:
                announce(f"{unread[0]}: what it holds could not be looked at; the job's memory stays")
            else:  # it never attached, or saved nothing
                self._daemon.keeps_segments = False
            return
        if self._signals.count > 1:
            self._daemon.kill()
            self._tell(self._look(), hasty=True)
            return
        if not has_ended:
            self._daemon.kill(except_engine=True)
        left = self._look()
        if self._spec.checkpoint.is_durable and self._is_behind(left):
            self._flush()
            left = self._look()
        self._tell(left)

    def _is_behind(self, left: LeftCheckpoints) -> bool:
        from flyball.cli.run.going_on import DURABLE

        newest, durable = left.newest(), left.newest(DURABLE)
        return newest is not None and (durable is None or durable.step < newest.step)

    def _tell(self, left: LeftCheckpoints, *, hasty: bool = False) -> None:
        """Say where the newest step is; it leaves the memory only if that is a disk or a store, by its bytes."""
        from flyball.cli.run.going_on import DURABLE, MEMORY

        newest, durable = left.newest(), None if hasty else left.verified(DURABLE)
        if newest is None:
            return
        if durable is not None and durable.step >= newest.step and durable.verified:
            self._daemon.keeps_segments = bool(left.unread_memory)
            self._say(durable, f"is in {self._place(durable)} (verified)")
        elif left.newest(MEMORY) == newest:
            why = "" if hasty else f", and {self._on_disk(newest, durable)}"
            self._say(newest, f"stays in the memory of this machine{why}")
        else:
            self._say(newest, f"is in {self._place(newest)} (not verified)")

    def _on_disk(self, newest: Point, durable: Point | None) -> str:
        if not self._spec.checkpoint.is_durable:
            return "nothing writes it to a disk"
        if durable is None:
            return f"could not be written to {self._spec.checkpoint.disk_dir or self._spec.checkpoint.persistent_dir}"
        if durable.step >= newest.step:
            return f"is in {self._place(durable)} too; there was no time to verify that"
        return f"could not be written to disk; step {durable.step} is in {self._place(durable)}"

    def _place(self, point: Point) -> str:
        checkpoint = self._spec.checkpoint
        return checkpoint.persistent_dir if point.tier.value == "persistent" else checkpoint.disk_dir

    def _say(self, point: Point, where: str) -> None:
        words = ["flyball", "run", *(["--state-dir", self._record.state_dir] if self._record.state_dir else [])]
        command = shlex.join([*words, "--resume", self._spec.job])
        announce(f"step {point.step} of job {self._spec.job} {where}; go on with: {command}")

    def _look(self) -> LeftCheckpoints:
        from flyball.cli.run.going_on import LeftCheckpoints

        past = self._past()
        return LeftCheckpoints(
            self._home,
            self._spec.checkpoint,
            host_id=self._daemon.host_id,
            run=past.run if past else "",
            lineage=past.lineage if past else (),
            environ=self._environ,
        )

    def _past(self) -> PastRun | None:
        from flyball.cli.run.going_on import open_jobs

        with open_jobs(self._home.path) as store:
            return store.past(self._spec.job) if store is not None else None

    def _flush(self) -> None:
        """Have the engine write its newest recovery point. A second signal ends the wait."""
        announce(
            f"writing the newest step of job {self._spec.job} to disk (at most {FLUSH_WITHIN_S:.0f} s; again: at once)"
        )
        import asyncio

        from host_daemon.engine.engine_client import EngineClient

        client = EngineClient(self._home.host / ENGINE_SOCKET)
        request = Flush(self._spec.job, FLUSH_WITHIN_S, durable=True)
        failed: list[FlyballError] = []

        def ask() -> None:
            try:
                asyncio.run(client.ask(request, timeout_s=FLUSH_WITHIN_S + 2.0))
            except FlyballError as error:
                failed.append(error)

        asking = threading.Thread(target=ask, name="last-flush", daemon=True)
        asking.start()
        while asking.is_alive() and self._signals.count <= 1:
            asking.join(_LOOK_INTERVAL_S)
        if failed:
            announce(f"it could not be written: {failed[0].message}")
