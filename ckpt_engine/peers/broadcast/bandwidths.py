"""How fast this host gets bytes from the store and from other hosts, as it has measured while it restored."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec
import structlog

from ckpt_engine.contracts.peer_wire import MAX_PROBE_BYTES, ProbeBandwidth, Reply, ShardVerdict
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.rules.broadcast import Bandwidth
from flyball.contracts import wire
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError, InvalidMessage
from flyball.state_folder import write_private

log = structlog.get_logger()

_NEWEST = 8  # measurements, of which the median counts
_LEAST_BYTES = 1 << 20  # of a measurement: fewer measure how long a request takes
_MAX_AGE_S = 86_400.0


class Way(StrEnum):
    """Where bytes come from."""

    STORE = "store"
    NETWORK = "network"  # another host


class _Measured(msgspec.Struct, frozen=True):
    bytes_per_s: float
    at: float  # wall clock


class _Transfers:
    """Those in progress: several at a time share what there is."""

    def __init__(self) -> None:
        self.count = 0
        self.began_s = 0.0
        self.size_bytes = 0


class MeasuredBandwidths:
    """Thread-safe. The newest measurements are in a file, so that the next engine has them; nothing depends on it."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._now = {way: _Transfers() for way in Way}
        self._measured: dict[Way, tuple[_Measured, ...]] = self._load()

    @contextmanager
    def measuring(self, way: Way) -> Iterator[Callable[[int], None]]:
        """Call the function with the bytes that came, as they come. Transfers at the same time are measured
        together."""
        now = self._now[way]
        with self._lock:
            if now.count == 0:
                now.began_s, now.size_bytes = time.monotonic(), 0
            now.count += 1

        def count(size_bytes: int) -> None:
            with self._lock:
                now.size_bytes += size_bytes

        try:
            yield count
        finally:
            with self._lock:
                now.count -= 1
                is_measured = now.count == 0 and now.size_bytes >= _LEAST_BYTES
                seconds, size_bytes = max(time.monotonic() - now.began_s, 1e-6), now.size_bytes
                if is_measured:
                    newest = _Measured(size_bytes / seconds, self._clock.wall_s())
                    self._measured[way] = (*self._measured.get(way, ()), newest)[-_NEWEST:]

    def known(self, way: Way) -> Bandwidth | None:
        """What was measured within a day; None if nothing was."""
        now = self._clock.wall_s()
        with self._lock:
            found = [measured for measured in self._measured.get(way, ()) if 0 <= now - measured.at <= _MAX_AGE_S]
        if not found:
            return None
        age_s = round(now - found[-1].at)
        return Bandwidth(
            statistics.median(measured.bytes_per_s for measured in found), f"measured, the last time {age_s} s ago"
        )

    def store(self) -> None:
        """Write the file; it need not survive a power cut."""
        with self._lock:
            data = wire.encode(self._measured)
        try:
            write_private(self._path, data, durable=False)
        except OSError as error:
            log.warning("bandwidths_not_stored", path=str(self._path), reason=str(error))

    def _load(self) -> dict[Way, tuple[_Measured, ...]]:
        try:
            return wire.decode(self._path.read_bytes(), dict[Way, tuple[_Measured, ...]])
        except FileNotFoundError:
            return {}
        except (InvalidMessage, OSError) as error:
            log.warning("bandwidths_not_read", path=str(self._path), reason=str(error))
            return {}


def probe_network(dial: Dial, address_of: Mapping[str, str], host_id: str, *, timeout_s: float) -> Bandwidth | None:
    """Have another host send something: of these, the next one after `host_id`. None if it does not."""
    hosts = sorted(address_of)
    host = next((host for host in hosts if host > host_id), hosts[0])
    buffer = memoryview(bytearray(MAX_PROBE_BYTES))
    try:
        with dial(host, address_of[host]) as connection:
            reply = connection.request(ProbeBandwidth(len(buffer)), Reply, timeout_s=timeout_s)
            if reply.verdict is not ShardVerdict.OK:
                return None
            began_s = time.monotonic()
            connection.receive_raw(buffer)
            return Bandwidth(len(buffer) / max(time.monotonic() - began_s, 1e-6), f"a probe from {host}")
    except FlyballError as error:
        log.warning("network_not_measured", peer=host, reason=error.message)
        return None
