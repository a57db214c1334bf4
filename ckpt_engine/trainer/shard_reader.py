"""The trainer's restore: wait until a local slot holds the step, or the engine names a file with it, and load that."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import MutableMapping
from pathlib import Path

from ckpt_engine.contracts.control_views import RestoreAnswer, RestoreState, RestoreWords
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.rules.slot_rules import SlotState, SlotView
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.commit_link import CommitLink, LocalCommitter
from ckpt_engine.trainer.mapped_slots import MappedSlots
from ckpt_engine.trainer.step_reader import StepReader
from flyball.contracts.checkpoints import Tier, is_alive, world_size_of
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed, StateMismatch
from flyball.sdk.worker_identity import WorkerIdentity

_log = logging.getLogger("flyball.engine")

_RESTORE_POLL_S = 0.001


class ShardReader:
    """Loads one rank's shard of the step that the controller named."""

    def __init__(self, identity: WorkerIdentity, segments: RankSegments, link: CommitLink | None, step: int) -> None:
        """`step` is the step to restore. Make this early: the slots that hold it are mapped in the background, while
        the worker builds its model."""
        self._me = identity
        self._segments = segments
        self._link = link
        self._step = step
        self._world_size = self._saved_by(step)
        self._reason = "no slot of this host holds it"
        self._ahead = MappedSlots()
        if self._world_size == identity.world_size:
            for view in segments.slots():
                manifest = self._alive_shard(view)
                if manifest is not None:
                    with contextlib.suppress(CorruptShard, OSError):  # the restore reports it
                        self._ahead.add(segments.open_payload(view.index), manifest)
        else:
            StepReader(identity, segments, link, step, self._world_size, mapped=self._ahead).map_ahead()
        self._ahead.start()

    def close(self) -> None:
        """Let go of the mapped slots. A restore afterwards reads them by system calls."""
        self._ahead.close()

    def restore(self, state: MutableMapping[str, object]) -> Tier:
        """Load the step into `state` from a local slot: at once if the step survived the last worker, else when the
        engine has fetched it. Or load it from a file that the engine names. Returns the tier it came from.

        If another number of ranks saved the step, or `state` has another layout than it had then, it is loaded from the
        shards of all ranks.

        Raises RestoreFailed if the shard cannot be had (`state` may be filled in part then), StateMismatch if it does
        not fit. Lets go of the mapped slots in any case.
        """
        try:
            return self._restore(state)
        finally:
            self.close()

    def _restore(self, state: MutableMapping[str, object]) -> Tier:
        deadline_s = time.monotonic() + self._me.checkpoint.restore_timeout_s
        if isinstance(self._link, LocalCommitter):
            self._commit_what_was_captured(self._link)
        if self._world_size != self._me.world_size:
            return self._parts(state, deadline_s)
        try:
            return self._own_shard(state, deadline_s)
        except StateMismatch as error:
            from ckpt_engine.trainer.state.sharded_tensors import OtherLayout  # torch is loaded by now

            if not isinstance(error, OtherLayout):
                raise
            _log.info("the state has another layout than it was saved in: %s", error)
            try:
                return self._parts(state, deadline_s)
            except RestoreFailed as reason:  # an older step would have the same layout
                raise OtherLayout(f"{error.message} {reason.message}", hint=error.hint) from reason

    def _parts(self, state: MutableMapping[str, object], deadline_s: float) -> Tier:
        """Load parts of the shards of all ranks."""
        reader = StepReader(self._me, self._segments, self._link, self._step, self._world_size, mapped=self._ahead)
        if isinstance(self._link, LocalCommitter):
            return reader.restore_alone(state, deadline_s)
        return reader.restore_with_engine(state, deadline_s)

    def _own_shard(self, state: MutableMapping[str, object], deadline_s: float) -> Tier:
        """Load the shard of this rank. Raises OtherLayout as well."""
        control, generation, step = self._segments.control, self._me.generation, self._step
        while True:
            engine = control.read_restore()  # before the slots: READY means that one holds it
            in_slot = self._from_slots(state)
            if in_slot or (engine.path and self._from_file(state, engine)):
                control.answer_restore(generation, RestoreAnswer.DONE)
                brought = control.read_restore() if in_slot else engine
                was_brought = brought.generation == generation and (brought.slot >= 0 or not in_slot)
                return brought.tier if was_brought else Tier.MEMORY
            refused = control.restore_answer(generation) is RestoreAnswer.REFUSED
            if isinstance(self._link, LocalCommitter):
                break
            if engine.generation == generation:
                if engine.state is RestoreState.FAILED:
                    self._reason = engine.error
                    break
                if engine.state is RestoreState.READY and not refused:
                    break
            if time.monotonic() >= deadline_s:
                self._reason += f"; the engine brought no other within {self._me.checkpoint.restore_timeout_s:g} s"
                break
            time.sleep(_RESTORE_POLL_S)
        raise RestoreFailed(
            f"Rank {self._me.rank} cannot have step {step}: {self._reason}.",
            hint="restore an older recovery point in a new generation; see the engine's log",
        )

    def _from_slots(self, state: MutableMapping[str, object]) -> bool:
        for view in self._segments.slots():
            manifest = self._alive_shard(view)
            if manifest is None:
                continue
            try:
                self._read_slot(view, manifest, state)
            except (CorruptShard, OSError) as error:
                if isinstance(error, CorruptShard) or error.errno == errno.EIO:  # not a lack of descriptors or memory
                    self._segments.discard(view)  # so that no inventory lists it
                self._refuse(error)
            else:
                return True
        return False

    def _read_slot(self, view: SlotView, manifest: Manifest, state: MutableMapping[str, object]) -> None:
        from ckpt_engine.trainer.restore.load_shard import restore_into

        descriptor = self._segments.open_payload(view.index)
        try:
            restore_into(state, self._ahead.source(descriptor), manifest)
        finally:
            os.close(descriptor)

    def _from_file(self, state: MutableMapping[str, object], offer: RestoreWords) -> bool:
        """Load the file, unless the engine has begun to fill a slot instead, or the trainer has refused the offer."""
        control, me = self._segments.control, self._me
        if offer.generation != me.generation or control.restore_answer(me.generation) is RestoreAnswer.REFUSED:
            return False
        control.answer_restore(me.generation, RestoreAnswer.READING_FILE)
        answer = RestoreAnswer.NONE
        try:
            if control.read_restore() != offer:
                return False
            from ckpt_engine.trainer.restore.load_shard import load_described, read_description

            path = Path(offer.path)
            stored = read_description(path)
            manifest = stored.manifest
            if not self._is_mine(manifest):
                run = f"{manifest.job} {manifest.run}".rstrip()
                raise CorruptShard(f"{path} holds step {manifest.step} of rank {manifest.rank} of {run}.")
            load_described(path, stored, state)
            answer = RestoreAnswer.DONE
        except (CorruptShard, OSError) as error:
            answer = RestoreAnswer.REFUSED
            self._refuse(error)
        finally:
            control.answer_restore(me.generation, answer)
        return answer is RestoreAnswer.DONE

    def _refuse(self, error: CorruptShard | OSError) -> None:
        """Ask the engine for another copy."""
        _log.warning("a copy of the restore step is bad: %s", error)
        self._reason = str(error)
        self._segments.control.answer_restore(self._me.generation, RestoreAnswer.REFUSED)

    def _alive_shard(self, view: SlotView) -> Manifest | None:
        if view.state is SlotState.COMMITTED and view.step == self._step:
            manifest = self._segments.committed(view.index)
            return manifest if manifest is not None and self._is_mine(manifest) else None
        return None

    def _is_mine(self, manifest: Manifest) -> bool:
        me = self._me
        described = (manifest.job, manifest.run, manifest.step, manifest.rank, manifest.world_size)
        return described == (me.job, me.run, self._step, me.rank, me.world_size) and is_alive(
            manifest.generation, self._step, me.lineage
        )

    def _saved_by(self, step: int) -> int:
        """How many ranks saved the step."""
        lineage = self._me.lineage
        alive = next((entry.generation for entry in lineage if is_alive(entry.generation, step, lineage)), -1)
        return world_size_of(alive, lineage, of_job=self._me.world_size)

    def _commit_what_was_captured(self, committer: LocalCommitter) -> None:
        """Without an engine nobody has hashed the last worker's captures yet."""
        for view in self._segments.slots():
            if view.state is SlotState.CAPTURED and is_alive(view.generation, view.step, self._me.lineage):
                try:
                    committer.commit(view)
                except (FlyballError, OSError) as error:
                    _log.warning("slot %d is not usable: %s", view.index, error)
