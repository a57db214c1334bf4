"""One generation's restore of a step in another layout, on one host: what the trainers of all local ranks ask for, and
what the daemon reports. See `ckpt_engine.contracts.wanted_chunks`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from ckpt_engine.contracts.control_views import RestoreAnswer, RestoreState, RestoreWords
from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.wanted_chunks import (
    MAX_ATTEMPTS,
    MAX_WANTED_BYTES,
    brought_name,
    decode_wanted,
    wanted_name,
)
from ckpt_engine.counters import Counters
from ckpt_engine.format.chunk_runs import chunks_of
from ckpt_engine.peers.step_gathering import Brought, StepGathering
from ckpt_engine.slots.control_segment import ControlSegment
from ckpt_engine.tiers.memory import OpenSegments
from flyball.contracts.checkpoints import RestoreReport, Tier
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError, InvalidMessage, RestoreFailed, StaleCommand
from flyball.worker_files import NotRegularFile, read_worker_file

log = structlog.get_logger()


class Resharding:
    """Call `run` for each local rank that needs another layout, in any thread. Thread-safe."""

    def __init__(
        self,
        generation: HostGeneration,
        step: int,
        gathering: StepGathering,
        *,
        clock: Clock,
        counters: Counters,
        on_report: Callable[[RestoreReport], None],
    ) -> None:
        self._generation = generation
        self._step = step
        self._gathering = gathering
        self._clock = clock
        self._counters = counters
        self._on_report = on_report
        self._attempts: dict[int, int] = {}  # by rank: the one that is awaited

    def run(self, entry: OpenSegments) -> bool:
        """Offer the step's folder to the rank's trainer, and bring what it asks for; or write why that is not possible.
        Call again until it returns True: when the trainer has asked (`RestoreMoved`). It may restore once more."""
        control, rank = entry.segments.control, entry.rank
        words, answer = control.read_restore(), control.restore_answer(self._generation.number)
        if words.generation == self._generation.number and words.state is RestoreState.FAILED:
            self._gathering.leave(rank)
            return True
        if answer is RestoreAnswer.DONE:
            self._gathering.leave(rank)
            return False
        try:
            folder = self._gathering.open(rank)
            if answer is RestoreAnswer.REFUSED and words.state is not RestoreState.FOLDER:  # it begins anew
                self._forget(rank, folder)
                words = self._words(RestoreState.PENDING)
            if (words.generation, words.path) != (self._generation.number, str(folder)):
                control.write_restore(self._words(RestoreState.FOLDER, path=str(folder)))
            self._serve(control, rank, folder)
        except StaleCommand as error:
            log.info("restore_superseded", job=self._generation.job, rank=rank, reason=error.message)
            return True
        except (FlyballError, OSError) as error:
            self._counters.add("restores_failed")
            log.error("restore_failed", job=self._generation.job, rank=rank, reason=str(error))
            control.write_restore(self._words(RestoreState.FAILED, error=str(error)))
            self._gathering.leave(rank)
            return True
        return False

    def _forget(self, rank: int, folder: Path) -> None:
        """Remove what the rank's trainer and this engine left for each other, from the last attempt to the first."""
        for attempt in range(self._attempts.pop(rank, 0), -1, -1):
            for name in (wanted_name(rank, attempt), brought_name(rank, attempt)):
                (folder / name).unlink(missing_ok=True)

    def _serve(self, control: ControlSegment, rank: int, folder: Path) -> None:
        """Bring what the trainer asks for, if it does."""
        attempt = self._attempts.get(rank, 0)
        data = _read_if_there(folder / wanted_name(rank, attempt))
        if data is None:
            return
        if attempt == MAX_ATTEMPTS:
            raise RestoreFailed(
                f"The trainer refused the restored bytes {attempt} times: this host's memory is faulty.",
                hint="drain the host; the job restores elsewhere",
            )
        began_s = self._clock.monotonic_s()
        wanted = self._checked(rank, data)
        if attempt > 0:  # it found something bad
            self._gathering.recheck(rank, wanted)
        brought = self._gathering.bring(rank, wanted)
        self._attempts[rank] = attempt + 1
        control.write_restore(self._words(RestoreState.READY, path=str(folder), brought=brought))
        (folder / brought_name(rank, attempt)).touch()
        self._report(rank, brought, self._clock.monotonic_s() - began_s)

    def _checked(self, rank: int, data: bytes) -> dict[int, list[int]]:
        """The chunks by the rank that saved them. Raises InvalidMessage for any that do not exist."""
        manifests = self._gathering.manifests(rank)
        wanted: dict[int, list[int]] = {}
        for shard in decode_wanted(data).shards:
            manifest = manifests.get(shard.rank)
            if manifest is None or shard.rank in wanted:
                raise InvalidMessage(f"Rank {rank} asks for the shard of rank {shard.rank}, or asks for it twice.")
            try:
                wanted[shard.rank] = chunks_of(shard.runs, manifest)
            except ValueError as error:
                raise InvalidMessage(f"Rank {rank} asks for what no shard has: {error}") from error
        return wanted

    def _report(self, rank: int, brought: Brought, seconds: float) -> None:
        self._counters.add("restores")
        report = RestoreReport(
            job=self._generation.job,
            generation=self._generation.number,
            rank=rank,
            step=self._step,
            source_tier=brought.main_tier,
            source_host=next(iter(brought.hosts)) if len(brought.hosts) == 1 else "",
            size_bytes=brought.size_bytes,
            socket_bytes=brought.delivery.socket_bytes,
            seconds=seconds,
            at=self._clock.wall_s(),
            transport=brought.delivery.transport,
            tier_bytes=brought.tier_bytes,
        )
        self._on_report(report)
        log.info(
            "restore_ready",
            job=report.job,
            rank=rank,
            step=report.step,
            tier=str(report.source_tier),
            tier_bytes={str(tier): size_bytes for tier, size_bytes in report.tier_bytes.items()},
            saved_by=self._gathering.world_size,
            transport=report.transport,
            socket_bytes=report.socket_bytes,
            seconds=round(seconds, 6),
        )

    def _words(
        self, state: RestoreState, *, path: str = "", brought: Brought | None = None, error: str = ""
    ) -> RestoreWords:
        return RestoreWords(
            generation=self._generation.number,
            state=state,
            step=self._step,
            slot=-1,
            tier=brought.main_tier if brought else Tier.MEMORY,
            socket_bytes=brought.delivery.socket_bytes if brought else 0,
            error=error,
            path=path,
        )


def _read_if_there(path: Path) -> bytes | None:
    """The content of a trainer's file; None if there is none. Raises InvalidMessage for anything but a small file."""
    try:
        data = read_worker_file(path, MAX_WANTED_BYTES + 1)
    except FileNotFoundError:
        return None
    except NotRegularFile:
        data = None
    if data is None or len(data) > MAX_WANTED_BYTES:
        raise InvalidMessage(f"{path} is no file of at most {MAX_WANTED_BYTES} bytes.")
    return data
