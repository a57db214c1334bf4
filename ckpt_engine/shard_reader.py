"""The trainer's restore: it waits until a local slot holds the step, and loads it from there."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping

from ckpt_engine.engine_link import CommitLink
from ckpt_engine.local_commit import LocalCommitter
from ckpt_engine.manifest import Manifest
from ckpt_engine.slots import RankSegments, RestoreState, SlotState, SlotView
from flyball.contracts.checkpoints import is_alive
from flyball.contracts.errors import CorruptShard, RestoreFailed
from flyball.worker_identity import WorkerIdentity

_log = logging.getLogger("flyball.engine")

_RESTORE_POLL_S = 0.001


class ShardReader:
    """Loads one rank's shard of the step that the controller named."""

    def __init__(self, identity: WorkerIdentity, segments: RankSegments, link: CommitLink | None) -> None:
        self._me = identity
        self._segments = segments
        self._link = link

    def restore(self, state: MutableMapping[str, object], step: int) -> None:
        """Load `step` into `state` from the local slot as soon as it holds the step: at once if it survived the last
        worker, else when the engine has fetched it. Raises RestoreFailed if the shard cannot be had: `state` may then
        be filled in part. Raises StateMismatch if it does not fit."""
        from ckpt_engine.restore import restore_into
        from ckpt_engine.verified_read import MemorySource

        segments = self._segments
        deadline_s = time.monotonic() + self._me.checkpoint.restore_timeout_s
        reason = "no slot of this host holds it"
        if isinstance(self._link, LocalCommitter):
            self._commit_what_was_captured(self._link)
        while True:
            engine = segments.control.read_restore()  # before the slots: ready means that they hold it
            for view in segments.slots():
                manifest = self._alive_shard(view, step)
                if manifest is None:
                    continue
                try:
                    return restore_into(state, MemorySource(segments.payload(view.index)), manifest)
                except CorruptShard as error:
                    segments.discard(view)  # so that no inventory lists it
                    reason = str(error)
            if isinstance(self._link, LocalCommitter):
                break
            if engine.generation == self._me.generation and engine.state is not RestoreState.PENDING:
                reason = engine.error or reason
                break
            if time.monotonic() >= deadline_s:
                reason = f"the engine did not fetch it within {self._me.checkpoint.restore_timeout_s:g} s"
                break
            time.sleep(_RESTORE_POLL_S)
        raise RestoreFailed(
            f"Rank {self._me.rank} cannot have step {step}: {reason}.",
            hint="a generation with an older recovery point is needed; see the engine's log",
        )

    def _alive_shard(self, view: SlotView, step: int) -> Manifest | None:
        if (
            view.state is SlotState.COMMITTED
            and view.step == step
            and is_alive(view.generation, step, self._me.lineage)
        ):
            return self._segments.committed(view.index)
        return None

    def _commit_what_was_captured(self, committer: LocalCommitter) -> None:
        """Without an engine nobody has hashed what the last worker left."""
        for view in self._segments.slots():
            if view.state is SlotState.CAPTURED and is_alive(view.generation, view.step, self._me.lineage):
                try:
                    committer.commit(view)
                except CorruptShard as error:
                    _log.warning("slot %d is not usable: %s", view.index, error)
