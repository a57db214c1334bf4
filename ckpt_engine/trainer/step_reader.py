"""The trainer's restore of a step that was saved in another layout: by another number of ranks, or sharded in another
way. It reads parts of the shards of all ranks, which the engine brings; see `ckpt_engine.contracts.wanted_chunks`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_engine.contracts.control_views import RestoreAnswer, RestoreState, RestoreWords
from ckpt_engine.contracts.wanted_chunks import brought_name, encode_wanted, wanted_name
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import shard_name
from ckpt_engine.format.verified_read import ByteSource
from ckpt_engine.rules.likely_parts import likely_parts
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.commit_link import CommitLink
from ckpt_engine.trainer.mapped_slots import MappedSlots
from flyball.contracts.checkpoints import Tier, is_alive
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed
from flyball.contracts.on_host.segments import rank_segment
from flyball.process_start import without_collector
from flyball.sdk.worker_identity import WorkerIdentity

if TYPE_CHECKING:
    from ckpt_engine.trainer.restore.load_step import StepLoad

_log = logging.getLogger("flyball.engine")

_POLL_S = 0.001


class StepReader:
    """Loads one rank's part of the step that the controller named."""

    def __init__(
        self,
        identity: WorkerIdentity,
        segments: RankSegments,
        link: CommitLink | None,
        step: int,
        world_size: int,
        *,
        mapped: MappedSlots,
    ) -> None:
        """`world_size` ranks saved `step`. Slots that are `mapped` are read from there."""
        self._me = identity
        self._segments = segments
        self._link = link
        self._step = step
        self._world_size = world_size
        self._mapped = mapped
        self._reason = "this host's engine offered no shards"

    def restore_with_engine(self, state: MutableMapping[str, object], deadline_s: float) -> Tier:
        """Load the step into `state`. Returns the tier that most of it came from. Raises RestoreFailed if a part cannot
        be had (`state` may be filled in part then), StateMismatch if the step does not fit."""
        control, me = self._segments.control, self._me
        control.ask_for_layout(me.generation)
        control.answer_restore(me.generation, RestoreAnswer.REFUSED)  # what was offered to an earlier restore
        self._moved()
        offer, attempt = RestoreWords(-1, RestoreState.PENDING, -1, -1, Tier.MEMORY, 0, ""), 0
        while True:
            if offer.generation != me.generation:
                offer = self._await(self._offered, deadline_s)
                control.answer_restore(me.generation, RestoreAnswer.NONE)
            with ExitStack() as opened:
                folder = Path(offer.path)
                load = self._begin(state, folder, attempt, opened)
                words = self._await(lambda: self._brought(folder, attempt), deadline_s)  # noqa: B023 - called at once
                if words.path != offer.path:  # of an engine that was started meanwhile
                    offer, attempt = words, 0
                    continue
                if load is not None and self._load(load):
                    control.answer_restore(me.generation, RestoreAnswer.DONE)
                    self._moved()
                    return words.tier
            attempt += 1

    def _offered(self) -> RestoreWords | None:
        words = self._segments.control.read_restore()
        return words if self._is_mine(words) and words.state is RestoreState.FOLDER else None

    def _brought(self, folder: Path, attempt: int) -> RestoreWords | None:
        """The words of the engine once it has brought what was wanted, or when another engine offers another folder."""
        is_there = (folder / brought_name(self._me.rank, attempt)).exists()
        words = self._segments.control.read_restore()  # afterwards: they were written before
        if is_there and self._is_mine(words) and words.path == str(folder):
            return words
        offered = self._offered()
        return offered if offered is not None and offered.path != str(folder) else None

    def _is_mine(self, words: RestoreWords) -> bool:
        return words.generation == self._me.generation and words.step == self._step

    def _await(self, look: Callable[[], RestoreWords | None], deadline_s: float) -> RestoreWords:
        """Poll until `look` finds something. Raises RestoreFailed if the engine gives up, or at the deadline."""
        while (found := look()) is None:
            words = self._segments.control.read_restore()
            if words.generation == self._me.generation and words.state is RestoreState.FAILED:
                raise self._failed(words.error)
            if time.monotonic() >= deadline_s:
                raise self._failed(
                    f"{self._reason}; the engine did not bring it within {self._me.checkpoint.restore_timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        return found

    def _begin(
        self, state: MutableMapping[str, object], folder: Path, attempt: int, opened: ExitStack
    ) -> StepLoad | None:
        """Plan the load, and ask for the chunks. None if manifests or headers are bad: the engine looks at them again
        when it is asked the next time."""
        load, wanted = None, {}
        try:
            with without_collector():
                load = self._plan(state, folder, opened)
                wanted = load.chunks()
        except (CorruptShard, OSError) as error:
            self._note(error)
        with suppress(FileNotFoundError):  # the folder of an engine that ended: the next one offers another
            path = folder / wanted_name(self._me.rank, attempt)
            path.with_suffix(".new").write_bytes(encode_wanted(wanted))
            path.with_suffix(".new").rename(path)
        self._moved()
        return load

    def _plan(self, state: MutableMapping[str, object], folder: Path, opened: ExitStack) -> StepLoad:
        from ckpt_engine.trainer.restore.load_shard import opened_file, read_manifest

        shards = []
        for number in range(self._world_size):
            path = folder / shard_name(number)
            manifest = read_manifest(path)
            descriptor = opened.enter_context(opened_file(path, manifest))
            shards.append(SavedShard(manifest, self._mapped.source(descriptor), is_whole=path.is_symlink()))
        return self._planned(state, shards)

    def _planned(self, state: MutableMapping[str, object], shards: Sequence[SavedShard]) -> StepLoad:
        from ckpt_engine.trainer.restore.load_step import StepLoad
        from ckpt_engine.trainer.restore.open_shard import OpenShard

        for number, shard in enumerate(shards):
            self._check(number, shard.manifest)
        return StepLoad(
            state,
            [OpenShard(shard.source, shard.manifest) for shard in shards],
            rank=self._me.rank,
            nearness=lambda number: 0 if shards[number].is_whole else 1,
        )

    def _check(self, rank: int, manifest: Manifest) -> None:
        """Raise CorruptShard unless it is the shard of this job's step."""
        me = self._me
        described = (manifest.job, manifest.run, manifest.step, manifest.rank, manifest.world_size)
        wanted = (me.job, me.run, self._step, rank, self._world_size)
        if described != wanted or not is_alive(manifest.generation, self._step, me.lineage):
            raise CorruptShard(f"The shard of rank {rank} is {described}, and {wanted} was to be restored.")

    def _load(self, load: StepLoad) -> bool:
        try:
            with without_collector():
                load.run()
        except (CorruptShard, OSError) as error:
            self._note(error)
            return False
        return True

    def _note(self, error: Exception) -> None:
        _log.warning("a copy of the restore step is bad: %s", error)
        self._reason = str(error)

    def _moved(self) -> None:
        if self._link is not None:
            self._link.restore_moved()

    def _failed(self, reason: str) -> RestoreFailed:
        return RestoreFailed(
            f"Rank {self._me.rank} cannot have its part of step {self._step}, which {self._world_size} ranks saved: "
            f"{reason}.",
            hint="restore an older recovery point in a new generation; see the engine's log",
        )

    # --- without an engine ---

    def restore_alone(self, state: MutableMapping[str, object], deadline_s: float) -> Tier:
        """Load the step from the slots of all ranks, which are on this host. Raises as `restore_with_engine`."""
        while True:
            with ExitStack() as opened:
                try:
                    found = [self._in_slots(rank, opened) for rank in range(self._world_size)]
                    missing = [rank for rank, shard in enumerate(found) if shard is None]
                    if not missing:
                        self._planned(state, [shard for shard in found if shard is not None]).run()
                        return Tier.MEMORY
                    self._reason = f"no slot of rank {', '.join(map(str, missing[:8]))} holds it"
                except (CorruptShard, OSError) as error:
                    self._note(error)
                    raise self._failed(self._reason) from error
            if time.monotonic() >= deadline_s:
                raise self._failed(self._reason)
            time.sleep(_POLL_S)

    def _in_slots(self, rank: int, opened: ExitStack) -> SavedShard | None:
        """The shard that `rank` saved, if one of its slots holds it."""
        found = self._open_slot(rank)
        if found is None:
            return None
        descriptor, manifest = found
        opened.callback(os.close, descriptor)
        return SavedShard(manifest, self._mapped.source(descriptor), is_whole=True)

    def _open_slot(self, rank: int) -> tuple[int, Manifest] | None:
        """The file of the slot of this host that holds the shard of `rank`. Raises CorruptShard, OSError."""
        with ExitStack() as stack:
            segments = self._segments
            if rank != self._me.rank:
                try:
                    segments = RankSegments.open(rank_segment(self._me.shm_prefix, self._me.job, rank))
                except (FlyballError, FileNotFoundError):
                    return None
                stack.callback(segments.close)
            for view in segments.slots():
                if view.state is SlotState.COMMITTED and view.step == self._step:
                    manifest = segments.committed(view.index)
                    if manifest is not None and manifest.world_size == self._world_size:
                        return segments.open_payload(view.index), manifest
            return None

    def map_ahead(self) -> None:
        """Have the slots of this host mapped that this rank will probably read."""
        me = self._me
        for rank, part in likely_parts(me.rank, me.world_size, self._world_size).items():
            with suppress(CorruptShard, OSError):  # the restore reports it
                found = self._open_slot(rank)
                if found is not None:
                    self._mapped.add(*found, part)


@dataclass(frozen=True, slots=True)
class SavedShard:
    """The shard of one of the ranks that saved the step. `is_whole`: all of it is here already."""

    manifest: Manifest
    source: ByteSource
    is_whole: bool
