"""This engine's connections to the others: their addresses, the standing links, and a pool for shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import Reply
from ckpt_engine.counters import Counters
from ckpt_engine.peers.links import PeerLinks
from ckpt_engine.peers.replication import Offer, send_replica
from ckpt_engine.peers.shard_transports import ShardTransports
from ckpt_engine.peers.transport.handshake import introduce
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.pool import ConnectionPool, Dial
from ckpt_engine.peers.transport.port import ByteCounters, Connection, Identity
from ckpt_engine.peers.transport.tcp import connect_tcp, split_address
from ckpt_engine.rules.rate_limit import RateLimit
from ckpt_engine.settings import EngineSettings
from flyball.contracts.checkpoints import PeerTransport
from flyball.contracts.errors import FlyballError, StaleCommand, Unreachable

log = structlog.get_logger()


class PeerAccess:
    """Thread-safe."""

    def __init__(
        self,
        identity: Identity,
        *,
        keys: PeerKeys,
        settings: EngineSettings,
        counters: Counters,
        total: ByteCounters,
        transports: ShardTransports,
        on_up: Callable[[str], None],
    ) -> None:
        """`on_up(host_id)` is called when a link to that host is made. `total` counts the bytes of TCP connections."""
        self._identity = identity
        self._keys = keys
        self._settings = settings
        self._total = total
        self._on_up = on_up
        self._transports = transports
        self._addresses: dict[str, str] = {}  # host -> "ip:port"
        self._lock = threading.Lock()
        self._limit = RateLimit(settings.peer_bytes_per_s, monotonic_s=time.monotonic)
        self._pool = ConnectionPool(
            lambda host_id, job: self.dial_shards(host_id, "", job),
            connections_per_peer=settings.pool_connections_per_peer,
            is_outdated=transports.is_outdated,
        )
        self.links = PeerLinks(
            dial=self.dial, on_up=self._link_is_up, on_lost=self._pool.abort, settings=settings, counters=counters
        )

    def close(self) -> None:
        self.links.close()
        self._pool.close()

    def learn_addresses(self, addresses: Mapping[str, str]) -> None:
        """Where a placement, or later the supervisor, says that engines are, by host."""
        with self._lock:
            self._addresses |= {host: addresses[host] for host in addresses if host != self._identity.host_id}

    def learn_caller(self, peer: Identity) -> None:
        """An engine has connected. After a restart it may listen on a port that the placement does not know. Raises
        InvalidMessage for an address that nobody could call."""
        split_address(peer.address)
        with self._lock:
            self._addresses[peer.host_id] = peer.address

    def dial(self, host_id: str, address: str, job: str = "") -> Connection:
        """A new TCP connection, handshake done; for the shards of a job if one is named. With `address` '' the newest
        known one is called. Raises Unreachable, Unauthorized, InvalidMessage."""
        return self._open(host_id, address, job)[0]

    def dial_shards(self, host_id: str, address: str, job: str) -> Connection:
        """`dial`, for shards: over the transport that both hosts can use. Raises RdmaRequired as well."""
        connection = self._transports.choose(*self._open(host_id, address, job))
        return connection if connection is not None else self._open(host_id, address, job)[0]

    def _open(self, host_id: str, address: str, job: str) -> tuple[Connection, bytes]:
        """A new TCP connection, and its key."""
        with self._lock:
            known = address or self._addresses.get(host_id, "")
        if not known:
            raise Unreachable(f"The address of {host_id}'s engine is not known.", hint="check that its engine runs")
        job, token = self._keys.to_call(host_id, job)
        identity = msgspec.structs.replace(self._identity, job=job)
        connection = connect_tcp(known, settings=self._settings, total=self._total)
        try:
            key = introduce(connection, identity=identity, token=token, timeout_s=self._settings.handshake_timeout_s)
        except FlyballError:
            connection.close()
            raise
        if connection.peer.host_id != host_id:
            connection.close()
            raise Unreachable(
                f"The engine at {known} belongs to {connection.peer.host_id}, not to {host_id}.",
                hint="nothing to do: the address is corrected when that host reports, or by the next placement",
            )
        return connection, key

    def dials_for(self, job: str) -> Dial:
        """`dial_shards`, for one job."""
        return partial(self.dial_shards, job=job)

    def transports(self) -> tuple[PeerTransport, ...]:
        """What carries the shards to and from the linked hosts."""
        return self._transports.about(self.links.targets())

    def put_replica(self, generation: HostGeneration, host_id: str, offer: Offer) -> Reply:
        """Offer a shard to a peer, within the bandwidth limit. Raises StaleCommand as soon as the generation ends."""

        def pace(size_bytes: int) -> None:
            self._limit.wait(size_bytes, generation.ended.wait)
            if generation.ended.is_set():
                raise StaleCommand("The copy to a peer was given up: a newer generation began.")

        with self._pool.connection(host_id, generation.job) as connection:
            return send_replica(connection, offer, settings=self._settings, pace=pace)

    def _link_is_up(self, host_id: str, incarnation: str) -> None:
        log.info("peer_connected", peer=host_id, incarnation=incarnation)
        self._on_up(host_id)
