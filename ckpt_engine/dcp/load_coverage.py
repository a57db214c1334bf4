"""Proves that a DCP load plan fills every element of every tensor that is to be loaded. DCP itself does not: an element
that no saved chunk has stays what it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from ckpt_engine.dcp.metadata_file import StoredItem
from ckpt_engine.format.coverage import Box, uncovered
from flyball.contracts.errors import RestoreFailed


def check_targets(plan: LoadPlan, planner: LoadPlanner, metadata: Metadata) -> None:
    """Raise RestoreFailed, naming the tensor, unless the plan's pieces make up every tensor of the planner's state dict
    that the checkpoint has. What it has not, the planner has refused or been told to leave.

    A planner without a flat `state_dict`, unlike those of DCP, is taken at its word for what it does not request.
    """
    pieces: dict[str, list[Box]] = defaultdict(list)  # in the whole tensor
    for item in plan.items:
        found = stored_item(item, metadata)
        if item.type is LoadItemType.TENSOR:
            piece, chunk = Box(tuple(item.storage_offsets), tuple(item.lengths)), _at_origin(found.sizes)
            if piece != chunk and uncovered(piece, [chunk]):
                raise _not_stored(item)
            begins = tuple(item.dest_index.offset or (0,) * len(item.lengths))
            offsets = tuple(begin + offset for begin, offset in zip(begins, item.dest_offsets, strict=True))
            pieces[item.dest_index.fqn].append(Box(offsets, tuple(item.lengths)))
    for fqn, box in _targets(planner, metadata):
        found_pieces = pieces[fqn]
        if found_pieces != [box] and (missing := uncovered(box, found_pieces)):
            raise RestoreFailed(
                f"{sum(part.elements for part in missing)} of the {box.elements} elements of {fqn!r} that this rank "
                f"needs, the first of them in {missing[0]}, are in no shard of the checkpoint.",
                hint="if the ranks saved without collectives, copy the files of all of them into the folder",
            )


def _at_origin(sizes: tuple[int, ...]) -> Box:
    return Box((0,) * len(sizes), sizes)


def stored_item(item: ReadItem, metadata: Metadata) -> StoredItem:
    """Where the chunk of a request lies. Raises RestoreFailed if the checkpoint has no such chunk."""
    found = metadata.storage_data.get(item.storage_index)
    if found is None:
        raise _not_stored(item)
    stored: StoredItem = found
    return stored


def _not_stored(item: ReadItem) -> RestoreFailed:
    index = item.storage_index
    return RestoreFailed(
        f"The plan reads {tuple(item.lengths)} at {tuple(item.storage_offsets)} of {index.fqn!r}'s chunk at "
        f"{tuple(index.offset or ())}, which the checkpoint does not have.",
        hint="load it with a planner that takes its plan from the checkpoint's metadata",
    )


def _targets(planner: LoadPlanner, metadata: Metadata) -> Iterator[tuple[str, Box]]:
    """The blocks of this rank, of every tensor that the checkpoint has."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, Mapping):
        return
    for fqn, value in state.items():
        if not isinstance(value, torch.Tensor) or not isinstance(
            metadata.state_dict_metadata.get(fqn), TensorStorageMetadata
        ):
            continue
        mesh = getattr(value, "device_mesh", None)
        if mesh is not None and mesh.get_coordinate() is None:
            continue  # this rank has no part of it
        for chunk in _create_chunk_list(value):
            yield fqn, Box(tuple(chunk.offsets), tuple(chunk.sizes))
