"""A saved step as whole tensors, put together from the shards of all ranks, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.format.coverage import Box, cover, range_of
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import SHARD_SUFFIX
from ckpt_engine.format.verified_read import ByteSource
from ckpt_engine.trainer.restore import stage_names
from ckpt_engine.trainer.restore.load_shard import opened_shard
from ckpt_engine.trainer.restore.load_step import shards_in
from ckpt_engine.trainer.restore.open_shard import OpenShard
from ckpt_engine.trainer.restore.piece_reads import PieceRead, read_pieces
from ckpt_engine.trainer.restore.restore_targets import Stored, stored
from ckpt_engine.trainer.state import state_tree, tree_building
from flyball.contracts.errors import CorruptShard, RestoreFailed

BATCH_BYTES = 256 << 20  # of tensors that are read together


class WholeStep:
    """What is not sharded is that of the first rank that has it. The shards stay open meanwhile."""

    def __init__(self, shards: Sequence[tuple[ByteSource, Manifest]]) -> None:
        """By rank. Raises CorruptShard, OSError; UnsupportedState for an optimizer of pipeline stages whose parameters
        have numbers, not names."""
        self._shards = [OpenShard(source, manifest) for source, manifest in shards]
        self.manifest = shards[0][1]
        self._shards[0].know(self._shards[1:])
        self._header = self._shards[0].known
        self._entries = self._shards[0].entries
        self.tensors: dict[str, Stored] = {}
        self.state(lambda _: None)
        if any(shard.header.tensors.keys() - self.tensors.keys() for shard in self._shards):
            self._entries = stage_names.united([shard.entries for shard in self._shards], "state")
            self.state(lambda _: None)

    @property
    def total_bytes(self) -> int:
        return sum(size_of(saved) for saved in self.tensors.values())

    def state(self, leaf: Callable[[Stored], Any]) -> dict[str, Any]:
        """The state, with `leaf` called once for each tensor. Numpy arrays count as tensors."""
        made: dict[str, Any] = {}

        def of_tag(tag: str, content: Any) -> Any:  # noqa: ANN401 - JSON in, anything out
            saved = stored(self._header, tag, content)
            self.tensors.setdefault(saved.name, saved)
            if saved.name not in made:
                made[saved.name] = leaf(saved)
            return made[saved.name]

        return {key: tree_building.build(node, of_tag) for key, node in self._entries.items()}

    def plain_tree(self) -> str:
        """The description of the state as one rank would save it: nothing is sharded."""
        return state_tree.encode(_without_sharding(self._entries))

    def batches(self, names: Iterable[str]) -> Iterator[list[str]]:
        """The names in order, those together that may be read together."""
        batch: list[str] = []
        size_bytes = 0
        for name in names:
            more_bytes = size_of(self.tensors[name])
            if batch and size_bytes + more_bytes > BATCH_BYTES:
                yield batch
                batch, size_bytes = [], 0
            batch.append(name)
            size_bytes += more_bytes
        if batch:
            yield batch

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """These tensors, in memory of their own."""
        whole = {name: torch.empty(shape_of(self.tensors[name]), dtype=self.tensors[name].dtype) for name in names}
        self.read_into(whole)
        return whole

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill contiguous tensors. Every element comes from verified bytes. Raises RestoreFailed if one is in no shard,
        CorruptShard, OSError."""
        pieces: list[list[PieceRead]] = [[] for _ in self._shards]
        for name, target in targets.items():
            memory = torch.view_as_real(target) if target.is_complex() else target
            if memory.numel() == 0:
                continue
            for rank, block, piece in self._pieces(name, tuple(memory.shape)):
                elements = range_of(piece, block)
                begin = self._shards[rank].begin_of(name) + elements.begin * memory.element_size()
                place = memory
                for dimension, (offset, size) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
                    place = place.narrow(dimension, offset, size)
                pieces[rank].append(PieceRead(begin, elements, place, place.dtype))
        for shard, of_shard in zip(self._shards, pieces, strict=True):
            read_pieces(shard.fill, of_shard)

    def _pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, Box, Box]]:
        """(rank, its block, the piece to take from it)."""
        whole = Box((0,) * len(shape), shape)
        found = []
        for rank, shard in enumerate(self._shards):
            entry = shard.header.tensors.get(name)
            if entry is not None:
                block = shard.header.blocks.get(name)
                if block is not None and block.global_shape != shape:
                    raise CorruptShard(f"The shards hold blocks of different tensors under the name {name!r}.")
                found.append((rank, whole if block is None else Box(block.offsets, entry.shape)))
                if block is None and entry.shape == shape:
                    break  # not sharded: rank 0's, or that of the first rank that has it
        pieces, missing = cover(whole, (box for _, box in found))
        if missing:
            raise RestoreFailed(
                f"{sum(box.elements for box in missing)} elements of {name!r}, the first of them in {missing[0]}, are "
                f"in no shard of the step.",
                hint="choose another step; `flyball ckpt verify` names what this one lacks",
            )
        for piece in pieces:
            rank, block_box = found[piece.block]
            yield rank, block_box, piece.box


@contextmanager
def opened_step(folder: Path) -> Iterator[WholeStep]:
    """The step in a folder like g1/step40. Raises RestoreFailed if a rank's shard is missing, CorruptShard, OSError."""
    with ExitStack() as opened:
        shards = []
        for rank, stored in enumerate(shards_in(folder)):
            path = folder / f"rank{rank}{SHARD_SUFFIX}"
            shards.append((opened.enter_context(opened_shard(path, stored)), stored.manifest))
        yield WholeStep(shards)


def shape_of(saved: Stored) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    return tuple(saved.block.global_shape)


def size_of(saved: Stored) -> int:
    return torch.Size(shape_of(saved)).numel() * saved.dtype.itemsize


def _without_sharding(node: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(node, list):
        return [_without_sharding(item) for item in node]
    if not isinstance(node, dict):
        return node
    if next(iter(node), "") == "$dtensor":
        return node["$dtensor"]["local"]
    return {key: item if key == "$metadata" else _without_sharding(item) for key, item in node.items()}
