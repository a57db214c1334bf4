"""DeepSpeed: its checkpoints go to memory first, with the disk behind, and without pickle.

    engine, *_ = deepspeed.initialize(...)
    use(engine)
    engine.load_checkpoint(folder)      # the newest, from memory if it is there
    ...
    engine.save_checkpoint(folder)

Names, folders and the file `latest` are DeepSpeed's. Each file is one of `flyball.save`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import flyball
from ckpt_engine.frameworks.foreign_objects import ForeignObjects, NamedFields
from ckpt_engine.frameworks.state_parts import not_installed
from ckpt_engine.trainer.path_saves.load_path import MapLocation
from ckpt_engine.trainer.path_saves.path_saver import PathSave
from flyball.contracts.errors import CheckpointError

try:
    from deepspeed import DeepSpeedEngine
    from deepspeed import comm as dist
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
except ImportError as error:
    raise not_installed("deepspeed", error) from error

_log = logging.getLogger("flyball.engine")

KNOWN = (
    NamedFields(ZeroStageEnum),
    NamedFields(fragment_address, ("numel", "start")),
    NamedFields(LossScaler, ("cur_scale", "dynamic")),
    NamedFields(
        DynamicLossScaler,
        (
            *("cur_scale", "dynamic", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale"),
            *("delayed_shift", "cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale", "dtype"),
        ),
    ),
)


def use(engine: DeepSpeedEngine, *, wait_for_disk: bool = False, known: Iterable[NamedFields] = ()) -> None:
    """Have `engine` save and load its checkpoints through Flyball. Call it in every rank, before `load_checkpoint`.

    `engine.save_checkpoint` returns when every rank's state is in shared memory: from then on the processes may be
    killed. The next one waits until this one is on the disk. With `wait_for_disk` each waits for itself, so the tag in
    `latest` also survives the loss of a host. `known` declares further classes of objects in the state, in the client
    state for example.
    """
    engine.checkpoint_engine = FlyballCheckpointEngine(ForeignObjects((*KNOWN, *known)), wait_for_disk=wait_for_disk)


class FlyballCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # untyped, where it is not installed
    """DeepSpeed's interface. Made by `use`."""

    def __init__(self, objects: ForeignObjects, *, wait_for_disk: bool) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._objects = objects
        self._wait_for_disk = wait_for_disk
        self._saves: list[PathSave] = []  # of the newest checkpoint

    def create(self, info: CheckpointCommitInfo) -> None:
        self._wait()

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        self._saves.append(flyball.save(self._objects.encode(state_dict), path))

    def load(self, path: str, map_location: MapLocation = None) -> Any:  # noqa: ANN401 - what was saved
        return self._objects.decode(flyball.load(path, map_location))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        if self._wait_for_disk and (failed := self._wait()):
            raise CheckpointError(f"{failed[0]} is not on the disk.", hint="see the log; an older checkpoint is whole")
        dist.barrier()  # `latest` is written after it, by one rank for all
        return True

    def cleanup(self) -> None:
        self._wait()

    def preserves_storage_sharing(self) -> bool:
        """A view is saved without the rest of its storage, so DeepSpeed need not clone it."""
        return False

    def _wait(self) -> list[str]:
        """Until this rank's newest checkpoint is on the disk. Returns the files that could not be written."""
        failed: list[str] = []
        saves, self._saves = self._saves, []
        for save in saves:
            if not save.wait():
                _log.warning("%s is in memory, and not on the disk: %s", save.path, save.error or "it takes too long")
                failed.append(save.path)
        return failed
