"""What all jobs of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.counters import Counters
from ckpt_engine.links import PeerLinks
from ckpt_engine.settings import EngineSettings
from ckpt_engine.transport.pool import ConnectionPool, Dial
from flyball.contracts.clock import Clock


@dataclass(frozen=True, slots=True)
class Services:
    """The host, the settings, and the ways to other engines."""

    host_id: str
    shm_prefix: str
    settings: EngineSettings
    clock: Clock
    counters: Counters
    pool: ConnectionPool
    links: PeerLinks
    dial: Dial
    code_version: str
