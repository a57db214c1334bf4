"""Pieces of the ranks' logs, requested through the supervisor and read by a host's daemon."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flyball.contracts.identity import Generation, HostId, JobName, SizeBytes

NEWEST = -1  # generation: the newest one that the host has a log of
MAX_PIECE_BYTES = 256 << 10

Count = Annotated[int, msgspec.Meta(ge=0)]


class LogRequest(msgspec.Struct, frozen=True):
    """Read a piece of one rank's log."""

    request_id: Annotated[str, msgspec.Meta(max_length=64)]
    job: JobName
    rank: Count
    generation: Annotated[int, msgspec.Meta(ge=NEWEST)] = NEWEST
    offset: int = 0  # negative: from the end
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECE_BYTES)] = MAX_PIECE_BYTES


class LogPiece(msgspec.Struct, frozen=True):
    """The requested piece. `generations` lists those with a log of this rank; empty: the host has no such log."""

    request_id: Annotated[str, msgspec.Meta(max_length=64)]
    host_id: HostId
    generation: Generation = NEWEST
    offset: SizeBytes = 0  # of `data`
    size_bytes: SizeBytes = 0  # of the whole log at this moment
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_PIECE_BYTES)] = b""
    generations: tuple[Generation, ...] = ()
