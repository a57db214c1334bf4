"""Reads pieces of stored tensors to where they belong in other tensors, which may lie in another way there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ckpt_engine.format.coverage import ElementRange

_ASIDE_BYTES = 256 << 20  # that are read aside at a time, because they lie otherwise at their place
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

# Fills contiguous tensors, each with the shard's bytes from an offset on; the ranges do not overlap.
Fill = Callable[[Iterable[tuple[int, torch.Tensor]]], None]


@dataclass(frozen=True, slots=True, eq=False)
class PieceRead:
    """A piece to read: the bytes of one shard from `begin` on, stored as `dtype`, and the tensor that gets them."""

    begin: int
    stored: ElementRange
    place: torch.Tensor
    dtype: torch.dtype

    @property
    def fits(self) -> bool:
        """Whether the bytes lie in the shard as they do in the place."""
        place = self.place
        return (
            self.stored.is_exact
            and place.is_contiguous()
            and place.dtype == self.dtype
            and type(place) in _PLAIN_TENSORS
            and not (place.is_neg() or place.is_conj())
        )

    @property
    def size_bytes(self) -> int:
        return self.stored.elements * self.dtype.itemsize


def read_pieces(fill: Fill, pieces: Sequence[PieceRead]) -> None:
    """Read the pieces of one shard, each in the dtype of its place. Raises what `fill` raises."""
    for batch in _batches(pieces):
        read = [(piece, piece.place if piece.fits else _aside(piece)) for piece in batch]
        fill((piece.begin, memory) for piece, memory in read)
        for piece, memory in read:
            if memory is not piece.place:
                piece.place.copy_(memory.as_strided(piece.place.shape, piece.stored.strides))


def _aside(piece: PieceRead) -> torch.Tensor:
    return torch.empty(piece.stored.elements, dtype=piece.dtype)


def _batches(pieces: Sequence[PieceRead]) -> Iterator[list[PieceRead]]:
    """In the order of the shard, such that the ranges of a batch do not overlap, and little is read aside at a time."""
    left = sorted(pieces, key=lambda piece: piece.begin)
    while left:
        batch, later, end, aside_bytes = [], [], 0, 0
        for piece in left:
            more_bytes = 0 if piece.fits else piece.size_bytes
            if piece.begin < end or (aside_bytes and aside_bytes + more_bytes > _ASIDE_BYTES):
                later.append(piece)
                continue
            batch.append(piece)
            end, aside_bytes = piece.begin + piece.size_bytes, aside_bytes + more_bytes
        yield batch
        left = later
