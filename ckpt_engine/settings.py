"""The engine's settings, and where checkpoint settings come from.

`EngineSettings` are a host's own: the engine and the trainers beside it read them. `CheckpointSpec` belongs to a job
and travels with the placement. Both can be set in one TOML file, in sections [engine] and [checkpoint], and by
variables FLYBALL_CKPT_<NAME>. Flags override variables, which override the file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.errors import ConfigurationError
from flyball.layered_settings import field_names, merge

VARIABLE_PREFIX = "FLYBALL_CKPT_"
CONFIG_VARIABLE = "FLYBALL_CKPT_CONFIG"

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
Limit = Annotated[int, msgspec.Meta(ge=0)]  # 0: none
Count = Annotated[int, msgspec.Meta(ge=1, le=65_536)]


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timeouts, intervals and limits of the engine."""

    connect_timeout_s: Seconds = 1.0  # to another engine
    handshake_timeout_s: Seconds = 5.0  # then an accepted connection without the token is closed
    io_timeout_s: Seconds = 10.0  # without a single byte of progress
    allocate_timeout_s: Seconds = 60.0  # a peer may have to create and pre-fault replica slots first
    idle_timeout_s: Seconds = 60.0  # of a pooled connection
    ping_interval_s: Seconds = 0.5  # between engines
    ping_timeout_s: Seconds = 1.5  # without an answer; then the other engine counts as unreachable
    reconnect_interval_s: Seconds = 0.1  # between attempts
    replicate_timeout_s: Seconds = 10.0  # after the first try; then a save continues without the peer
    replicate_retry_s: Seconds = 0.005  # a busy peer waits for the world step, for milliseconds
    scan_interval_s: Seconds = 0.5  # for captured slots, in case a notice was lost
    drain_timeout_s: Seconds = 5.0  # at SIGTERM, for commits in progress
    max_connections: Count = 256  # from peers; more if the job has more hosts
    max_control_connections: Count = 32  # from the daemon
    pool_connections_per_peer: Count = 4  # kept open
    transfer_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 28)] = 4 << 20  # per system call
    memory_limit_bytes: Limit = 0  # for all slots of one job on this host; 0: the machine's memory
    huge_pages: bool = False  # for the slots, if the kernel allows them in shared memory
    # Of shards between hosts. auto: RDMA where both hosts have it, else TCP; rdma: an error where it is missing.
    transport: Literal["auto", "rdma", "tcp"] = "auto"
    rdma_devices: str = ""  # that may be used, comma-separated: mlx5_0, or mlx5_0/1 for one port; empty: all
    rdma_traffic_class: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0  # of the packets that this host sends
    peer_bytes_per_s: Limit = 0  # replicas sent; restores are not limited; 0: no limit
    disk_bytes_per_s: Limit = 0  # written to the disk; 0: no limit
    persistent_bytes_per_s: Limit = 0  # written to the store; 0: no limit
    # Hosts that restore the same bytes from the store read them once together and pass them on; auto: if that is
    # measured to be faster.
    broadcast: Literal["auto", "on", "off"] = "auto"
    refill: bool = True  # an engine that starts empty fetches its ranks' shards from the peers
    segment_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] = 86_400.0  # of unused segments
    store_timeout_s: Seconds = 60.0  # of one request to an object store, for one part of a shard at most
    store_retry_s: Seconds = 120.0  # from a request's first try to its last; then the write has failed
    seal_timeout_s: Seconds = 30.0  # for a shared folder to show the shards of all hosts


_SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {"engine": EngineSettings, "checkpoint": CheckpointSpec}

Config = Mapping[str, Mapping[str, object]]  # by section; NO_CONFIG: no file

NO_CONFIG: Config = {}


def load_settings(environment: Mapping[str, str]) -> EngineSettings:
    """The host's settings from the file in FLYBALL_CKPT_CONFIG and from variables. Raises ConfigurationError."""
    path = environment.get(CONFIG_VARIABLE, "")
    return merge_engine(read_config(path) if path else NO_CONFIG, path, environment)


def merge_engine(
    config: Config, path: str, environment: Mapping[str, str], flags: Mapping[str, tuple[str, object]] | None = None
) -> EngineSettings:
    """The host's settings. `flags`: by field the flag's spelling and value. Raises ConfigurationError."""
    return merge(
        EngineSettings,
        table=config.get("engine", {}),
        file=path,
        variables=environment,
        prefix=VARIABLE_PREFIX,
        flags=flags,
    )


def merge_spec(
    config: Config, path: str, environment: Mapping[str, str], flags: Mapping[str, tuple[str, object]] | None = None
) -> CheckpointSpec:
    """The job's settings, likewise. With an interval in seconds, steps are saved at every step only if that is set."""
    table = config.get("checkpoint", {})
    spec = merge(CheckpointSpec, table=table, file=path, variables=environment, prefix=VARIABLE_PREFIX, flags=flags)
    steps_are_given = (
        "every_steps" in table or VARIABLE_PREFIX + "EVERY_STEPS" in environment or "every_steps" in (flags or {})
    )
    if spec.every_s > 0 and not steps_are_given:
        return msgspec.structs.replace(spec, every_steps=0)
    return spec


def check_variables(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError for an unknown FLYBALL_CKPT_* variable: a typo would be noticed only much later."""
    known = {VARIABLE_PREFIX + name.upper() for kind in _SECTIONS.values() for name in field_names(kind)}
    for name in sorted(environment):
        if name.startswith(VARIABLE_PREFIX) and name not in known and name != CONFIG_VARIABLE:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigurationError(
                f"The variable {name} is set, but there is no such setting.",
                hint=f"did you mean {near[0]}?" if near else "unset it; docs/reference/configuration.md lists all",
            )


def read_config(path: str) -> Config:
    """The sections of a TOML file. Raises ConfigurationError if it cannot be read, or has other sections."""
    try:
        with Path(path).open("rb") as file:
            config = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(
            f"The file {path} with checkpoint settings cannot be read: {error.strerror}.",
            hint=f"give the path of a TOML file with --ckpt-config or {CONFIG_VARIABLE}",
        ) from error
    except (ValueError, RecursionError) as error:  # also invalid UTF-8, or endless nesting
        raise ConfigurationError(f"The file {path} is not valid TOML: {error}.", hint="correct it") from error
    for name, section in config.items():
        if name not in _SECTIONS or not isinstance(section, dict):
            raise ConfigurationError(
                f"The file {path} has an unknown top-level entry {name}.",
                hint="only the sections [engine] and [checkpoint] are allowed",
            )
    return config
