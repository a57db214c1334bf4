"""What all jobs of an engine share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, nextafter
from pathlib import Path

import msgspec

from ckpt_engine.counters import Counters
from ckpt_engine.peers.links import PeerLinks
from ckpt_engine.peers.transport.pool import ConnectionPool, Dial
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.rate_limit import RateLimit
from flyball.contracts.checkpoints import RestoreReport, StoredPoints, Tier
from flyball.contracts.clock import Clock

_REMEMBERED = 256


class RestoreLog:
    """Thread-safe. Ranks are restored side by side, and the clock may be set back: so that nobody who was told of one
    misses what comes after it, each has a later moment than the one before."""

    def __init__(self) -> None:
        self._reports: deque[RestoreReport] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def add(self, report: RestoreReport) -> None:
        with self._lock:
            if self._reports and report.at <= self._reports[-1].at:
                report = msgspec.structs.replace(report, at=nextafter(self._reports[-1].at, inf))
            self._reports.append(report)

    def since(self, at: float) -> tuple[RestoreReport, ...]:
        """Restores whose bytes were verified after this wall time."""
        with self._lock:
            return tuple(report for report in self._reports if report.at > at)


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
    stored_points: Callable[[], StoredPoints | None]  # as it last told them; None: it does not tell
    rate_limits: Mapping[Tier, RateLimit] = field(default_factory=dict)  # of the slow tiers; none: as fast as it goes
    restores: RestoreLog = field(default_factory=RestoreLog)
