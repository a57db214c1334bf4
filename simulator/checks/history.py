"""What truly happened in a simulated cluster, as its checkers read it. The services see none of this."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import msgspec

from flyball.contracts.identity import Fence

NO_SOURCE = "no source had the step"  # why a rank that could not restore ended
EXPECTED = "expected"  # it was told to
HOST_WENT = "its host went"


class FaultBegan(msgspec.Struct, frozen=True, tag=True):
    at: float
    fault: str


class FaultEnded(msgspec.Struct, frozen=True, tag=True):
    at: float
    fault: str


class HostWent(msgspec.Struct, frozen=True, tag=True):
    """A machine stopped (its memory is lost), or came up."""

    at: float
    host_id: str
    is_up: bool


class Obeyed(msgspec.Struct, frozen=True, tag=True):
    """A daemon began to carry out a command. `resumed`: an earlier daemon of the host had begun it."""

    at: float
    host_id: str
    job: str
    command_id: str
    kind: str
    fence: Fence
    resumed: bool


class WorkerBegan(msgspec.Struct, frozen=True, tag=True):
    at: float
    host_id: str
    job: str
    generation: int
    rank: int


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """A host could not start its ranks."""

    at: float
    host_id: str
    job: str
    generation: int
    code: str


class WorkerWent(msgspec.Struct, frozen=True, tag=True):
    at: float
    host_id: str
    job: str
    generation: int
    rank: int
    why: str


class Granted(msgspec.Struct, frozen=True, tag=True):
    """A controller granted a generation. `told`: the newest whole step of its history among all copies that the
    database knew, `asked`: among those of hosts that are asked; -1: none."""

    at: float
    job: str
    generation: int
    told: int
    asked: int


class Restored(msgspec.Struct, frozen=True, tag=True):
    """All ranks of a generation have loaded a step (-1: they began from scratch). `held`: the newest step of the
    same history that hosts which were in reach since before it was granted still held whole."""

    at: float
    job: str
    generation: int
    step: int
    source_generation: int
    held: int
    newest: int  # that any generation of this history completed
    is_one_step: bool  # for all ranks, saved by one generation


class Parked(msgspec.Struct, frozen=True, tag=True):
    """Ranks of a generation stood at an emergency step until now."""

    at: float
    generation: int
    stood_s: float


class Saved(msgspec.Struct, frozen=True, tag=True):
    """Every rank has a verified copy of a step."""

    at: float
    job: str
    generation: int
    step: int


class Condemned(msgspec.Struct, frozen=True, tag=True):
    """A controller called a host silent. `witness`: a host that heard of it and was heard, '' if there was none."""

    at: float
    host_id: str
    is_up: bool
    witness: str


class CoreFault(msgspec.Struct, frozen=True, tag=True):
    """The core logged an error: an action that cannot be moved, a report that cannot be stored."""

    at: float
    event: str
    detail: str


Fact: TypeAlias = (
    FaultBegan
    | FaultEnded
    | HostWent
    | Obeyed
    | WorkerBegan
    | StartFailed
    | WorkerWent
    | Granted
    | Restored
    | Parked
    | Saved
    | Condemned
    | CoreFault
)


def fingerprint(facts: list[Fact], *documents: object) -> str:
    """Two runs with the same fingerprint went the same way, to the last digit."""
    digest = hashlib.sha256()
    for part in (*facts, *documents):
        digest.update(msgspec.json.encode(part))
    return digest.hexdigest()
