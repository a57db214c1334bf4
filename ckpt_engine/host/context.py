"""What all jobs of an engine share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.contracts.counters import Counters
from ckpt_engine.host.restore_log import RestoreLog
from ckpt_engine.peers.links import PeerLinks
from ckpt_engine.peers.transport.pool import ConnectionPool, Dial
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.rate_limit import RateLimit
from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import Clock


@dataclass(frozen=True, slots=True)
class Services:
    """The host, the settings, and the ways to other engines."""

    host_id: str
    state_dir: Path
    shm_prefix: str
    settings: EngineSettings
    clock: Clock
    counters: Counters
    pool: ConnectionPool
    links: PeerLinks
    peer_limit: RateLimit  # of what is sent into peers' memory
    dial: Dial
    code_version: str
    in_touch: Callable[[], bool]  # whether the supervisor cannot have given this host up
    rate_limits: Mapping[Tier, RateLimit] = field(default_factory=dict)  # of the slow tiers; none: as fast as it goes
    restores: RestoreLog = field(default_factory=RestoreLog)
