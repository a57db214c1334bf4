"""Records what truly happened in a simulated cluster, for the checkers. The services see none of this."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import msgspec

from flyball.contracts.identity import Fence

NO_SOURCE = "no source had the step"  # why a rank that could not restore ended
EXPECTED = "expected"  # it was ordered to
HOST_LOST = "its host went"


class FaultBegan(msgspec.Struct, frozen=True, tag=True):
    at: float
    fault: str


class FaultEnded(msgspec.Struct, frozen=True, tag=True):
    at: float
    fault: str


class HostSwitched(msgspec.Struct, frozen=True, tag=True):
    """A machine stopped (its memory is lost), or came up."""

    at: float
    host_id: str
    is_up: bool


class Obeyed(msgspec.Struct, frozen=True, tag=True):
    """A daemon began to execute a command. `resumed`: an earlier daemon of the host had begun it."""

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


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    at: float
    host_id: str
    job: str
    generation: int
    rank: int
    why: str


class Granted(msgspec.Struct, frozen=True, tag=True):
    """A controller granted a generation.

    `known_step`: the newest complete step of its history among all copies that the database knew.
    `reachable_step`: among the copies on the hosts being stopped, and in the store. `stored_step`: among those in the
    store alone. -1: none. `heard_of`: the newest generation of which the database knew a step; 0: none.
    """

    at: float
    job: str
    generation: int
    known_step: int
    reachable_step: int
    stored_step: int = -1
    heard_of: int = 0


class Restored(msgspec.Struct, frozen=True, tag=True):
    """All ranks of a generation have loaded a step (-1: from scratch).

    `held_step`: the newest complete step of the same history on hosts that were in reach since before the grant.
    """

    at: float
    job: str
    generation: int
    step: int
    source_generation: int
    held_step: int
    newest_step: int  # completed by any generation of this history
    is_one_step: bool  # the same for all ranks, saved by one generation


class Parked(msgspec.Struct, frozen=True, tag=True):
    """Ranks of a generation stood parked at an emergency step until now."""

    at: float
    generation: int
    stood_s: float


class Saved(msgspec.Struct, frozen=True, tag=True):
    """Every rank has a verified copy of a step."""

    at: float
    job: str
    generation: int
    step: int


class Sealed(msgspec.Struct, frozen=True, tag=True):
    """The store has the shards of all ranks of a step, and its world manifest."""

    at: float
    job: str
    generation: int
    step: int


class Condemned(msgspec.Struct, frozen=True, tag=True):
    """A controller declared a host silent. `witness`: a host in touch with both it and the sensor; '' if there was
    none."""

    at: float
    host_id: str
    is_up: bool
    witness: str


class Cordoned(msgspec.Struct, frozen=True, tag=True):
    """A controller took a host out of work by itself. `beside`: those that it took within the hour before, and that are
    still out; `hosts` and `largest_domain`: of the whole cluster."""

    at: float
    host_id: str
    beside: tuple[str, ...]
    hosts: int
    largest_domain: int


class CoreFault(msgspec.Struct, frozen=True, tag=True):
    """The core logged an error: an action that cannot advance, a report that cannot be stored."""

    at: float
    event: str
    detail: str


Fact: TypeAlias = (
    FaultBegan
    | FaultEnded
    | HostSwitched
    | Obeyed
    | WorkerBegan
    | StartFailed
    | WorkerEnded
    | Granted
    | Restored
    | Parked
    | Saved
    | Sealed
    | Condemned
    | Cordoned
    | CoreFault
)


def fingerprint(facts: list[Fact], *documents: object) -> str:
    """Equal for two runs that went exactly the same way."""
    digest = hashlib.sha256()
    for part in (*facts, *documents):
        digest.update(msgspec.json.encode(part))
    return digest.hexdigest()
