"""Megatron-core: sharded checkpoints in Flyball's format, each chunk with its checksum, loaded into any other sharding.

    dist_checkpointing.save(sharded_state_dict, folder, FlyballSaveStrategy())
    state_dict = dist_checkpointing.load(sharded_state_dict, folder)

The folder's `metadata.json` names the format, so that loading finds `FlyballLoadStrategy` by itself once this module is
imported. What is not sharded (`common.pt`), and Megatron's ShardedObjects, stay files of Megatron's own strategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckpt_engine.dcp.reader import FlyballReader
from ckpt_engine.dcp.writer import FlyballWriter
from ckpt_engine.frameworks.state_parts import not_installed
from flyball.contracts.errors import UsageError

try:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.base import (
        LoadShardedStrategy,
        SaveShardedStrategy,
        StrategyAction,
        register_default_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreLoadPlanner,
        MCoreSavePlanner,
        _replace_sharded_keys_with_state_dict_keys,
        _replace_state_dict_keys_with_sharded_keys,
        _restore_dict_types,
        _unwrap_pyt_sharded_tensor,
        mcore_to_pyt_state_dict,
    )
except ImportError as error:
    raise not_installed("megatron-core", error) from error

BACKEND, VERSION = "flyball", 1


class FlyballSaveStrategy(SaveShardedStrategy):  # type: ignore[misc]  # untyped, where it is not installed
    """Pass it as `sharded_strategy` to `dist_checkpointing.save`, or into `FullyParallelSaveStrategyWrapper`."""

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Save the main replica of every shard. Collective; when it returns, everything is on the disk."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        dcp_save(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=FlyballWriter(checkpoint_dir),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )


class FlyballLoadStrategy(LoadShardedStrategy):  # type: ignore[misc]  # untyped, where it is not installed
    """What `dist_checkpointing.load` uses for a folder that `FlyballSaveStrategy` wrote."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        """Load into the sharding of `sharded_state_dict`, whatever it was saved in. Collective.

        Raises CheckpointException (torch's) with the reason: a missing tensor, another shape, or CorruptShard.
        """
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        by_key, flat, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        loaded = mcore_to_pyt_state_dict(by_key, is_loading=True)
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        dcp_load(loaded, storage_reader=FlyballReader(checkpoint_dir), planner=planner)
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in loaded.items()}
        state: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat, renamed)
        _restore_dict_types(state, sharded_state_dict)
        return state

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """A ShardedTensor without data for each tensor of the checkpoint."""
        described = FlyballReader(checkpoint_dir).read_metadata().state_dict_metadata
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
            ).without_data()
            for key, tensor in described.items()
            if isinstance(tensor, TensorStorageMetadata)
        }

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise UsageError(f"This checkpoint was saved with {loaded_backend!r}.", hint="load it without a strategy")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version > VERSION:
            raise UsageError(
                f"This checkpoint has version {loaded_version}, and this release reads up to {VERSION}.",
                hint="load it with the release that saved it",
            )


register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, FlyballSaveStrategy())
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, FlyballLoadStrategy())
