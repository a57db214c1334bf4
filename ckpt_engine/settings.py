"""The engine's numbers, each with its unit; every one can be set as FLYBALL_CKPT_<NAME>."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from flyball.contracts.errors import ConfigurationError

VARIABLE_PREFIX = "FLYBALL_CKPT_"

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
    replicate_timeout_s: Seconds = 10.0  # from the commit to the moment a save counts as failed for want of its peer
    replicate_retry_s: Seconds = 0.005  # a busy peer is waiting for the world step, which is milliseconds away
    scan_interval_s: Seconds = 0.5  # captured slots are also looked for, in case a notice was lost
    drain_timeout_s: Seconds = 5.0  # at SIGTERM, for commits in flight
    max_connections: Count = 256
    max_control_connections: Count = 32
    pool_connections_per_peer: Count = 4
    transfer_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 28)] = 4 << 20  # handed to the kernel at once
    memory_limit_bytes: Limit = 0  # of all slots of one job on this host; 0: what the machine has
    huge_pages: bool = False  # transparent huge pages for the slots, where the kernel allows them in shared memory
    peer_bytes_per_s: Limit = 0  # sent to peers; 0: as fast as it goes
    disk_bytes_per_s: Limit = 0
    persistent_bytes_per_s: Limit = 0
    refill: bool = True  # an engine that starts empty gets its ranks' shards back from the peers
    segment_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=31_536_000)] = 86_400.0  # of segments nobody uses any more
    store_timeout_s: Seconds = 60.0  # of one request to an object store, which moves one part of a shard at most
    store_retry_s: Seconds = 120.0  # from its first try to its last; then the write counts as failed
    seal_timeout_s: Seconds = 30.0  # for a shared folder to show what all hosts wrote, before its world manifest


def load_settings(environment: Mapping[str, str]) -> EngineSettings:
    """Settings from FLYBALL_CKPT_* variables; raises ConfigurationError that names the variable."""
    given: dict[str, str] = {}
    for field in msgspec.structs.fields(EngineSettings):
        variable = VARIABLE_PREFIX + field.name.upper()
        if variable in environment:
            given[field.name] = environment[variable]
    try:
        return msgspec.convert(given, EngineSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"A setting of the checkpoint engine is not usable: {error}.",
            hint=f"correct or unset the variables that begin with {VARIABLE_PREFIX}",
        ) from error
