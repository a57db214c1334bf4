"""The engine's numbers, each with its unit; and where the settings of checkpoints come from.

There are two structs: what is a host's own (`EngineSettings`, read by the engine and by the trainers beside it) and
what is a job's (`CheckpointSpec`, which travels with the placement). Both can be given in one TOML file, in sections
[engine] and [checkpoint], and as FLYBALL_CKPT_<NAME>; flags come before variables, those before the file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

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
    """Timeouts, intervals and bounds of the engine's server."""

    connect_timeout_s: Seconds = 1.0
    handshake_timeout_s: Seconds = 5.0  # an accepted connection that has not shown the token by then is closed
    io_timeout_s: Seconds = 10.0  # without a single byte of progress
    allocate_timeout_s: Seconds = 60.0  # a peer may have to create and pre-fault replica slots before it takes a shard
    idle_timeout_s: Seconds = 60.0  # a pooled connection without a request
    ping_interval_s: Seconds = 0.5
    ping_timeout_s: Seconds = 1.5
    reconnect_interval_s: Seconds = 0.1
    replicate_timeout_s: Seconds = 10.0  # from the first try to the moment a save goes on without a peer; see docs
    replicate_retry_s: Seconds = 0.005  # a busy peer is waiting for the world step, which is milliseconds away
    scan_interval_s: Seconds = 0.5  # captured slots are also looked for, in case a notice was lost
    drain_timeout_s: Seconds = 5.0  # at SIGTERM, for commits in flight
    max_connections: Count = 256  # from peers; more if the job has more hosts than that
    max_control_connections: Count = 32
    pool_connections_per_peer: Count = 4
    transfer_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 28)] = 4 << 20  # handed to the kernel at once
    memory_limit_bytes: Limit = 0  # of all slots of one job on this host; 0: what the machine has
    huge_pages: bool = False  # transparent huge pages for the slots, where the kernel allows them in shared memory
    peer_bytes_per_s: Limit = 0  # of replicas sent; a restore is not limited; 0: as fast as it goes
    disk_bytes_per_s: Limit = 0
    persistent_bytes_per_s: Limit = 0
    refill: bool = True  # an engine that starts empty gets its ranks' shards back from the peers
    segment_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] = 86_400.0  # of segments nobody uses any more
    store_timeout_s: Seconds = 60.0  # of one request to an object store, which moves one part of a shard at most
    store_retry_s: Seconds = 120.0  # from its first try to its last; then the write counts as failed
    seal_timeout_s: Seconds = 30.0  # for a shared folder to show what all hosts wrote, before its world manifest


_SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {"engine": EngineSettings, "checkpoint": CheckpointSpec}

Config = Mapping[str, Mapping[str, object]]  # by section; NO_CONFIG: no file

NO_CONFIG: Config = {}


def load_settings(environment: Mapping[str, str]) -> EngineSettings:
    """The host's settings from the file that FLYBALL_CKPT_CONFIG names, and from variables. Raises ConfigurationError
    that names the place."""
    path = environment.get(CONFIG_VARIABLE, "")
    return merge_engine(read_config(path) if path else NO_CONFIG, path, environment)


def merge_engine(
    config: Config, path: str, environment: Mapping[str, str], flags: Mapping[str, tuple[str, object]] | None = None
) -> EngineSettings:
    """The host's settings. `flags`: by field the flag as given, and its value."""
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
    """The job's settings, likewise. An interval in seconds stands in place of the default of a save at every step."""
    table = config.get("checkpoint", {})
    spec = merge(CheckpointSpec, table=table, file=path, variables=environment, prefix=VARIABLE_PREFIX, flags=flags)
    steps_are_given = (
        "every_steps" in table or VARIABLE_PREFIX + "EVERY_STEPS" in environment or "every_steps" in (flags or {})
    )
    if spec.every_s > 0 and not steps_are_given:
        return msgspec.structs.replace(spec, every_steps=0)
    return spec


def check_variables(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a FLYBALL_CKPT_* variable that sets nothing: it would be missed only much later."""
    known = {VARIABLE_PREFIX + name.upper() for kind in _SECTIONS.values() for name in field_names(kind)}
    for name in sorted(environment):
        if name.startswith(VARIABLE_PREFIX) and name not in known and name != CONFIG_VARIABLE:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigurationError(
                f"The variable {name} is set, and there is no such setting.",
                hint=f"did you mean {near[0]}?" if near else "unset it; docs/checkpoints.md lists all of them",
            )


def read_config(path: str) -> Config:
    """The sections of a TOML file. Raises ConfigurationError if it cannot be read or has others than these."""
    try:
        with Path(path).open("rb") as file:
            config = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(
            f"The file {path} with checkpoint settings cannot be read: {error.strerror}.",
            hint=f"give the path of a TOML file with --ckpt-config or {CONFIG_VARIABLE}",
        ) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, or nested without end, as well
        raise ConfigurationError(f"The file {path} is no TOML: {error}.", hint="correct it") from error
    for name, section in config.items():
        if name not in _SECTIONS or not isinstance(section, dict):
            raise ConfigurationError(
                f"The file {path} has {name} at its top level.",
                hint="there are two sections, [engine] and [checkpoint], and nothing beside them",
            )
    return config
