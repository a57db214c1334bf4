"""What a rank will probably read when it restores a step of another number of ranks, before its state is known. Pure.

Most tensors are sharded over their rows, and every rank has as many. A wrong guess costs nothing but its work.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_engine.format.shard_format import ShardHeader


class Part(NamedTuple):
    """Of the rows of a shard's tensors, those from `begin` / `of` to `end` / `of`."""

    begin: int
    end: int
    of: int

    @property
    def is_whole(self) -> bool:
        return self.begin == 0 and self.end == self.of


def likely_parts(rank: int, world_size: int, saved_by: int) -> dict[int, Part]:
    """What `rank` of `world_size` needs of the shards of `saved_by` ranks, by the rank that saved them."""
    first, last = rank * saved_by // world_size, ((rank + 1) * saved_by - 1) // world_size
    return {
        saved: Part(
            max(0, rank * saved_by - saved * world_size),
            min(world_size, (rank + 1) * saved_by - saved * world_size),
            world_size,
        )
        for saved in range(first, last + 1)
    }


def ranges_of(part: Part, header: ShardHeader) -> list[tuple[int, int]]:
    """The bytes of a shard from (begin, end) on that are this part of its tensors. All of a tensor that is not sharded
    over its rows, or not only over them."""
    found = []
    for name, tensor in header.tensors.items():
        begin, end = (header.data_start + offset for offset in tensor.data_offsets)
        block, rows = header.blocks.get(name), tensor.shape[0] if tensor.shape else 0
        if block is not None and rows and block.global_shape[1:] == tensor.shape[1:]:
            row_bytes = (end - begin) // rows
            begin, end = (
                begin + row_bytes * row for row in (rows * part.begin // part.of, -(-rows * part.end // part.of))
            )
        if begin < end:
            found.append((begin, end))
    return found
