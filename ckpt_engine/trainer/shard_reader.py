"""The trainer's restore: wait until a local slot holds the step, or the engine names a file with it, and load that."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path

from ckpt_engine.contracts.control_views import RestoreAnswer, RestoreState, RestoreWords
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.verified_read import MemorySource, SlotFileSource
from ckpt_engine.rules.slot_rules import SlotState, SlotView
from ckpt_engine.slots import segment_files
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.commit_link import CommitLink, LocalCommitter
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.checkpoints import Tier, is_alive
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed
from flyball.sdk.worker_identity import WorkerIdentity

_log = logging.getLogger("flyball.engine")

_RESTORE_POLL_S = 0.001
_PIECE_BYTES = 16 << 20  # mapped at once; takes milliseconds


class ShardReader:
    """Loads one rank's shard of the step that the controller named."""

    def __init__(self, identity: WorkerIdentity, segments: RankSegments, link: CommitLink | None, step: int) -> None:
        """`step` is the step to restore. Make this early: the slots that hold it are mapped in the background, while
        the worker builds its model."""
        self._me = identity
        self._segments = segments
        self._link = link
        self._step = step
        self._reason = "no slot of this host holds it"
        self._ahead: dict[SlotView, SlotSource] = {}
        for view in segments.slots():
            if self._alive_shard(view) is not None:
                with contextlib.suppress(CorruptShard, OSError):  # the restore reports it
                    self._ahead[view] = SlotSource(segments.open_payload(view.index))

    def close(self) -> None:
        """Let go of the slots."""
        for source in self._ahead.values():
            source.close()
        self._ahead.clear()

    def restore(self, state: MutableMapping[str, object]) -> Tier:
        """Load the step into `state` from a local slot: at once if the step survived the last worker, else when the
        engine has fetched it. Or load it from a file that the engine names. Returns the tier it came from.

        Raises RestoreFailed if the shard cannot be had (`state` may be filled in part then), StateMismatch if it does
        not fit.
        """
        control, generation, step = self._segments.control, self._me.generation, self._step
        deadline_s = time.monotonic() + self._me.checkpoint.restore_timeout_s
        if isinstance(self._link, LocalCommitter):
            self._commit_what_was_captured(self._link)
        while True:
            engine = control.read_restore()  # before the slots: READY means that one holds it
            in_slot = self._from_slots(state)
            if in_slot or (engine.path and self._from_file(state, engine)):
                control.answer_restore(generation, RestoreAnswer.DONE)
                self.close()
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

        source = self._ahead.pop(view, None)
        source = source or SlotSource(self._segments.open_payload(view.index))
        try:
            restore_into(state, source, manifest)
        finally:
            source.close()

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
            from ckpt_engine.trainer.restore.load_shard import load_described, read_manifest

            path = Path(offer.path)
            manifest = read_manifest(path)
            if not self._is_mine(manifest):
                run = f"{manifest.job} {manifest.run}".rstrip()
                raise CorruptShard(f"{path} holds step {manifest.step} of rank {manifest.rank} of {run}.")
            load_described(path, manifest, state)
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
        described = (manifest.job, manifest.run, manifest.step, manifest.rank)
        return described == (me.job, me.run, self._step, me.rank) and is_alive(
            manifest.generation, self._step, me.lineage
        )

    def _commit_what_was_captured(self, committer: LocalCommitter) -> None:
        """Without an engine nobody has hashed the last worker's captures yet."""
        for view in self._segments.slots():
            if view.state is SlotState.CAPTURED and is_alive(view.generation, view.step, self._me.lineage):
                try:
                    committer.commit(view)
                except (FlyballError, OSError) as error:
                    _log.warning("slot %d is not usable: %s", view.index, error)


class SlotSource(SlotFileSource):
    """One slot's file, mapped in the background until somebody reads it. Close it.

    To map a large shard takes as long as to read it, but a worker has seconds between its start and its restore. Bytes
    that are mapped by then are read from the mapping, the rest by system calls, which take twice as long as a copy.
    """

    def __init__(self, descriptor: int) -> None:
        """Takes over `descriptor`."""
        super().__init__(descriptor)
        self._size_bytes = os.fstat(descriptor).st_size
        self._mapping = mmap.mmap(descriptor, self._size_bytes)
        self._payload = memoryview(self._mapping)
        self._mapped = MemorySource(self._payload)
        self._mapped_bytes = 0
        self._being_read = threading.Event()
        self._thread = WorkerThread("flyball-map", self._map_ahead, retry_s=None)
        self._thread.start()

    def read_into(self, target: memoryview, offset: int) -> None:
        self._being_read.set()
        if offset + len(target) <= self._mapped_bytes:
            self._mapped.read_into(target, offset)
        else:
            super().read_into(target, offset)

    def close(self) -> None:
        self._being_read.set()
        self._thread.join()
        os.close(self._descriptor)
        # Unmapping a large file takes a while, and nobody needs to wait for it.
        WorkerThread("flyball-unmap", self._unmap, retry_s=None).start()

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):  # an error's traceback still refers to it
            self._payload.release()
            self._mapping.close()

    def _map_ahead(self) -> None:
        with contextlib.suppress(OSError):  # an older kernel: everything is read by system calls
            for begin in range(0, self._size_bytes, _PIECE_BYTES):
                if self._being_read.is_set():
                    return
                size_bytes = min(_PIECE_BYTES, self._size_bytes - begin)
                segment_files.populate_for_reading(self._mapping, begin, size_bytes)
                self._mapped_bytes = begin + size_bytes
