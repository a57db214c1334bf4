"""Which blocks of a tensor make up another, and whether the blocks that ranks hold cover every element of the tensors
they are parts of. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpt_engine.format.manifest import TensorEntry


class Box(NamedTuple):
    """A block of a tensor: per dimension, where it begins and how long it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + size}" for o, size in zip(self.offsets, self.shape, strict=True)) + "]"


class CoverageProblem(NamedTuple):
    """A defect of one tensor of a step."""

    fqn: str
    reason: str


class BlockPiece(NamedTuple):
    """A part of a wanted block, and the number of the block that it is read from."""

    block: int
    box: Box  # in the whole tensor


class ElementRange(NamedTuple):
    """The elements of a block, in row-major order, from the first to the last of a piece of it.

    `strides` are the block's, in elements: with the piece's shape they view the piece in the range.
    """

    begin: int
    elements: int
    strides: tuple[int, ...]
    is_exact: bool  # the range has no elements but the piece's


def cover(wanted: Box, blocks: Iterable[Box]) -> tuple[list[BlockPiece], list[Box]]:
    """Disjoint pieces that make up `wanted`, each from the first block that has it; and the parts that no block has.
    All have the same number of dimensions."""
    pieces: list[BlockPiece] = []
    left = [wanted] if wanted.elements else []
    for index, block in enumerate(blocks):
        if not left:
            break
        later: list[Box] = []
        for rest in left:
            both = intersection(rest, block)
            if both is None:
                later.append(rest)
                continue
            pieces.append(BlockPiece(index, both))
            if both != rest:
                later += _without(rest, both)
        left = later
    return pieces, left


def uncovered(wanted: Box, blocks: Iterable[Box]) -> list[Box]:
    """The parts of `wanted` outside all `blocks`, as disjoint boxes; [] if it is covered."""
    return cover(wanted, blocks)[1]


def range_of(piece: Box, block: Box) -> ElementRange:
    """Where a piece, which has elements, lies in the block that contains it."""
    strides = tuple(math.prod(block.shape[dimension + 1 :]) for dimension in range(len(block.shape)))
    begin = sum((p - b) * s for p, b, s in zip(piece.offsets, block.offsets, strides, strict=True))
    elements = sum((size - 1) * s for size, s in zip(piece.shape, strides, strict=True)) + 1
    return ElementRange(begin, elements, strides, elements == piece.elements)


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two different boxes that overlap; None if no two do. The same box twice is a replica."""
    distinct = sorted({box for box in boxes if box.elements})
    for index, box in enumerate(distinct):
        for other in distinct[index + 1 :]:
            if box.shape and other.offsets[0] >= box.offsets[0] + box.shape[0]:
                break  # sorted by the first dimension: the rest begins even later
            if intersection(box, other) is not None:
                return box, other
    return None


def step_problems(shards: Iterable[Iterable[TensorEntry]]) -> tuple[CoverageProblem, ...]:
    """The defects of one step, given the tensors of each shard: () if every sharded tensor is complete.

    A tensor that a rank holds whole may be its own (a random generator's state), so ranks may differ in its shape. The
    blocks of a sharded tensor must agree in dtype and global shape, cover it, and overlap only as replicas.
    """
    split: dict[str, list[tuple[tuple[str, tuple[int, ...]], Box]]] = defaultdict(list)
    for tensors in shards:
        for tensor in tensors:
            split[tensor.fqn].append(((tensor.dtype, tensor.global_shape), Box(tensor.offsets, tensor.shape)))
    problems = []
    for fqn, blocks in sorted(split.items()):
        if any(box.shape != whole for (_, whole), box in blocks):
            reason = _problem(blocks)
            if reason:
                problems.append(CoverageProblem(fqn, reason))
    return tuple(problems)


def _problem(blocks: Sequence[tuple[tuple[str, tuple[int, ...]], Box]]) -> str:
    kinds = sorted({kind for kind, _ in blocks})
    if len(kinds) > 1:
        return f"its blocks are of different tensors: {' and '.join(f'{dtype} {shape}' for dtype, shape in kinds)}"
    shape = kinds[0][1]
    boxes = sorted({box for _, box in blocks})
    gaps = uncovered(Box((0,) * len(shape), shape), boxes)
    if gaps:
        missing = sum(gap.elements for gap in gaps)
        return f"{missing} of its {math.prod(shape)} elements are in no shard, the first of them in {gaps[0]}"
    if sum(box.elements for box in boxes) == math.prod(shape):
        return ""  # covered by exactly as many elements as it has: no overlap
    both = overlap(boxes)
    return f"its blocks {both[0]} and {both[1]} overlap, and neither is a replica of the other" if both else ""


def intersection(one: Box, other: Box) -> Box | None:
    """What two blocks share; None if they share no element."""
    begins, shape = [], []
    for a, size_a, b, size_b in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True):
        begin, end = max(a, b), min(a + size_a, b + size_b)
        if begin >= end:
            return None
        begins.append(begin)
        shape.append(end - begin)
    return Box(tuple(begins), tuple(shape))


def _without(rest: Box, box: Box) -> list[Box]:
    """`rest` minus a `box` in it, as boxes: per dimension the part before it and the part behind it."""
    parts = []
    offsets, shape = list(rest.offsets), list(rest.shape)
    for dimension, (begin, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        start, end = offsets[dimension], offsets[dimension] + shape[dimension]
        for low, high in ((start, begin), (begin + size, end)):
            if low < high:
                part_offsets = (*offsets[:dimension], low, *offsets[dimension + 1 :])
                part_shape = (*shape[:dimension], high - low, *shape[dimension + 1 :])
                parts.append(Box(part_offsets, part_shape))
        offsets[dimension], shape[dimension] = begin, size
    return parts
