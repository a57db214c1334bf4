"""The host that an engine runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths
from ckpt_engine.rules.rate_limit import RateLimit
from ckpt_engine.settings import EngineSettings
from flyball.contracts.checkpoints import Tier


@dataclass(frozen=True, slots=True)
class EngineHost:
    """Its name, its places and its settings."""

    host_id: str
    state_dir: Path
    shm_prefix: str  # of the names of all its segments
    settings: EngineSettings
    bandwidths: MeasuredBandwidths
    rate_limits: Mapping[Tier, RateLimit] = field(default_factory=dict)  # of writes; none: unlimited
    give_memory_back: Callable[[], None] = lambda: None  # that of removed slots, which a NIC may hold a little longer
