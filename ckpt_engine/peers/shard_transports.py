"""Which transport carries the shards between this host and each peer, and why: the setting `transport`, and what both
hosts have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from math import inf

import structlog

from ckpt_engine.contracts.peer_wire import OfferQueuePair
from ckpt_engine.peers.transport.port import Connection, Identity, Transport
from ckpt_engine.peers.transport.upgrade import (
    NoQueuePair,
    PathFailed,
    QueuePairs,
    answer_offer,
    check_offer,
    offer_queue_pair,
    refuse_offer,
)
from ckpt_engine.rules.failed_paths import FIRST_PAUSE_S, FailedPaths
from ckpt_engine.settings import EngineSettings
from flyball.contracts.checkpoints import MAX_PEER_TRANSPORTS, NO_TRANSPORT, PeerTransport
from flyball.contracts.errors import ConfigurationError, Unreachable

log = structlog.get_logger()


class RdmaRequired(ConfigurationError):
    """`transport = rdma`, but there is no queue pair with this peer. No byte goes over TCP instead."""

    code = "rdma_required"


class ShardTransports:
    """For all connections of one engine that carry shards. Thread-safe."""

    def __init__(
        self,
        host_id: str,
        *,
        settings: EngineSettings,
        queue_pairs: QueuePairs,
        on_change: Callable[[tuple[PeerTransport, ...]], None] = lambda known: None,
    ) -> None:
        """`on_change` gets what is known of all peers whenever it changes, one call at a time."""
        self._host_id = host_id
        self._settings = settings
        self._queue_pairs = queue_pairs
        self._on_change = on_change
        self._known: dict[str, PeerTransport] = {}  # by peer, the newest last
        self._paths = FailedPaths()
        self._look_again_s: dict[str, float] = {}  # by peer that TCP carries shards to: when to try RDMA again
        self._logged: dict[str, str] = {}  # by peer: why it got no queue pair
        self._lock = threading.Lock()
        self._notifying = threading.Lock()  # held while `on_change` runs

    def choose(self, connection: Connection, key: bytes) -> Connection | None:
        """The connecting side, after the handshake. Returns the connection to use; None: call the peer again, and use
        TCP. Raises RdmaRequired, Unauthorized, Unreachable, InvalidMessage; the connection is closed then."""
        peer = connection.peer.host_id
        if self._settings.transport == "tcp":
            self._note(peer, Transport.TCP, f"{self._host_id} is set to transport = tcp")
            return connection
        try:
            required = self._settings.transport == "rdma"
            if (failed := self._failed_path(connection.peer, required=required)) is not None:
                raise NoQueuePair(failed)
            upgraded = offer_queue_pair(
                connection,
                self._queue_pairs,
                own_host=self._host_id,
                required=required,
                key=key,
                timeout_s=self._settings.handshake_timeout_s,
            )
        except (NoQueuePair, PathFailed) as error:
            if isinstance(error, PathFailed):
                self._broke(connection.peer, time.monotonic(), error.message, nothing_passes=True)
            if self._settings.transport == "rdma":
                connection.close()
                self._note(peer, NO_TRANSPORT, error.message)
                raise RdmaRequired(
                    f"RDMA is required here (transport = rdma), but not possible with {peer}: {error.message}",
                    hint=error.hint or "mend it, or set FLYBALL_CKPT_TRANSPORT=auto; `flyball doctor` says what lacks",
                ) from error
            self._note(peer, Transport.TCP, error.message)
            if isinstance(error, PathFailed):
                connection.close()
                return None
            return connection
        except BaseException:
            connection.close()
            raise
        upgraded.watch(partial(self._broke, upgraded.peer, time.monotonic()), partial(self._carried, upgraded.peer))
        self._note(peer, Transport.RDMA, "both hosts have an active RDMA port")
        return upgraded

    def answer(self, connection: Connection, offer: OfferQueuePair, key: bytes) -> Connection:
        """The accepting side. Returns the connection to go on with. Raises Unauthorized, Unreachable, or
        InvalidMessage."""
        timeout_s, peer = self._settings.handshake_timeout_s, connection.peer
        required = offer.required or self._settings.transport == "rdma"
        refusal = self._failed_path(peer, required=required)
        if self._settings.transport == "tcp":
            refusal = "it is set to transport = tcp"
        if refusal is not None:
            check_offer(connection, offer, key=key)
            refuse_offer(connection, refusal, key=key, timeout_s=timeout_s)
            self._log_once("queue_pair_refused", peer.host_id, refusal)
            return connection
        try:
            return answer_offer(
                connection,
                offer,
                self._queue_pairs,
                key=key,
                timeout_s=timeout_s,
                on_broken=partial(self._broke, peer, time.monotonic()),
                on_carried=partial(self._carried, peer),
            )
        except NoQueuePair as error:
            self._log_once("queue_pair_refused", peer.host_id, error.message)
            return connection
        except Unreachable as error:
            self._log_once("queue_pair_failed", peer.host_id, error.message)
            raise

    def is_outdated(self, connection: Connection) -> bool:
        """Whether the peer is to be called again instead of using this idle connection: RDMA may be possible by now, or
        keeps failing."""
        peer, now_s = connection.peer.host_id, time.monotonic()
        with self._lock:
            if connection.transport is Transport.TCP:
                return now_s >= self._look_again_s.get(peer, inf)
            return self._settings.transport == "auto" and self._paths.pause_left_s(peer, now_s) > 0

    def about(self, hosts: Collection[str]) -> tuple[PeerTransport, ...]:
        """What is known about these peers, by name: those to which a connection for shards was made."""
        with self._lock:
            return tuple(self._known[host] for host in sorted(self._known) if host in hosts)[:MAX_PEER_TRANSPORTS]

    def close(self) -> None:
        self._queue_pairs.close()

    # --- what the way to a peer carries ---

    def _failed_path(self, peer: Identity, *, required: bool) -> str | None:
        """Why RDMA is not tried with the peer at the moment; None if it is. If it is required, it always is."""
        with self._lock:
            self._paths.met(peer.host_id, peer.incarnation)
            is_paused = self._paths.pause_left_s(peer.host_id, time.monotonic()) > 0
            return self._paths.reason(peer.host_id) if is_paused and not required else None

    def _broke(self, peer: Identity, made_s: float, reason: str, *, nothing_passes: bool = False) -> None:
        with self._lock:
            now_s = time.monotonic()
            gives_up = self._paths.failed(
                *(peer.host_id, peer.incarnation, reason), made_s=made_s, now_s=now_s, nothing_passes=nothing_passes
            )
            pause_s = self._paths.pause_left_s(peer.host_id, now_s)
        if gives_up and self._settings.transport == "auto":
            log.warning("rdma_path_given_up", peer=peer.host_id, reason=reason, look_again_s=round(pause_s))

    def _carried(self, peer: Identity) -> None:
        with self._lock:
            self._paths.carried(peer.host_id, peer.incarnation)
            self._logged.pop(peer.host_id, None)

    # --- shown ---

    def _note(self, peer: str, transport: str, reason: str) -> None:
        found = PeerTransport(peer, transport, reason[:1024])
        with self._lock:
            before = self._known.pop(peer, None)
            self._known[peer] = found
            while len(self._known) > MAX_PEER_TRANSPORTS:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._look_again_s.pop(oldest, None)
            if self._settings.transport == "auto":
                now_s = time.monotonic()
                pause_s = self._paths.pause_left_s(peer, now_s) or FIRST_PAUSE_S
                self._look_again_s[peer] = now_s if transport is Transport.RDMA else now_s + pause_s
        if found == before:
            return
        log.info("peer_transport", peer=peer, transport=str(transport), reason=reason)
        with self._notifying:
            with self._lock:
                known = tuple(self._known.values())
            self._on_change(known)

    def _log_once(self, event: str, peer: str, reason: str) -> None:
        """A peer that may use no queue pair asks again and again."""
        with self._lock:
            is_new = self._logged.pop(peer, None) != reason
            self._logged[peer] = reason
            while len(self._logged) > MAX_PEER_TRANSPORTS:
                del self._logged[next(iter(self._logged))]
        if is_new:
            log.warning(event, peer=peer, reason=reason)
