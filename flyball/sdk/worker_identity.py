"""Finds out which rank of which job this process is: by the daemon's variables or torchrun's, else a single rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry
from flyball.contracts.errors import ConfigurationError
from flyball.contracts.on_host import worker_env

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One rank of one generation, with the places of its beacon, slots and engine ('': there is none)."""

    job: str
    generation: int
    rank: int
    world_size: int
    local_world_size: int
    beacon: str
    shm_prefix: str
    engine_notify: str
    restore_step: int | None
    checkpoint: CheckpointSpec
    lineage: Lineage
    error_file: str = ""
    run: str = ""
    inject: str = ""  # where this rank finds faults to commit
    rank_pid: int = 0  # of the process that is this rank, if this one is not, and keeps nothing

    @property
    def supervised(self) -> bool:
        """Whether a daemon started this process."""
        return bool(self.beacon)

    def of_child(self, rank_pid: int) -> WorkerIdentity:
        """Of a process that the rank has started: it knows its rank, and nothing that it does counts as the rank's."""
        return replace(
            self,
            beacon="",
            shm_prefix="",
            engine_notify="",
            error_file="",
            inject="",
            restore_step=None,
            rank_pid=rank_pid,
        )


def read_identity(environment: Mapping[str, str]) -> WorkerIdentity:
    """Read the identity from `environment`. Raises ConfigurationError, naming the variable, for a bad value."""

    def value(name: str, kind: type[T], default: T) -> T:
        text = environment.get(name, "")
        if not text:
            return default
        try:
            return wire.decoder_of(kind).decode(text)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"The environment variable {name} has the value {text!r}: {error}.",
                hint="start the script with `flyball run`, which sets it",
            ) from error

    restarts = value("TORCHELASTIC_RESTART_COUNT", int, 0)
    generation = value(worker_env.GENERATION, int, restarts)
    world_size = value("WORLD_SIZE", int, 1)
    restore_step = value(worker_env.RESTORE_STEP, int, -1)
    return WorkerIdentity(
        job=environment.get(worker_env.JOB) or "standalone",
        generation=generation,
        rank=value("RANK", int, 0),
        world_size=world_size,
        local_world_size=value("LOCAL_WORLD_SIZE", int, world_size),
        beacon=environment.get(worker_env.BEACON, ""),
        shm_prefix=environment.get(worker_env.SHM_PREFIX, ""),
        engine_notify=environment.get(worker_env.ENGINE_NOTIFY, ""),
        restore_step=None if restore_step < 0 else restore_step,
        checkpoint=value(worker_env.CHECKPOINT, CheckpointSpec, CheckpointSpec()),
        lineage=value(worker_env.LINEAGE, tuple[LineageEntry, ...], (LineageEntry(generation),)),
        error_file=environment.get("TORCHELASTIC_ERROR_FILE", ""),
        run=environment.get(worker_env.RUN, ""),
        inject=environment.get(worker_env.INJECT, ""),
    )
