"""The step from TCP to a queue pair, after the handshake of a connection that is to carry shards.

The connecting side offers its queue pair, the accepting side connects its own to it and answers with it, or refuses
with a reason. Both prove by the connection's key that they sent every field. A message of several packets then goes
there and back over the queue pair: some networks drop RDMA without a word, or only its long packets.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Final, Protocol

from ckpt_engine.contracts.peer_wire import (
    AnswerQueuePair,
    OfferQueuePair,
    PathProbe,
    QueuePairEndpoint,
)
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.peers.transport.tcp import has_ended
from flyball.contracts import wire
from flyball.contracts.errors import FlyballError, Unauthorized, Unreachable

_MAX_REASON_CHARACTERS = 1024
_PROBE = PathProbe("0123456789abcdef" * 2048)  # 32 KiB: eight packets of the largest path MTU
# Why a queue pair was not made: what the host lacks, no memory or descriptors, whatever pyverbs raises.
_NOT_MADE: Final = (FlyballError, OSError, RuntimeError, ValueError)


class UpgradedConnection(Connection, Protocol):
    """A connection over a queue pair."""

    def watch(self, on_broken: Callable[[str], None], on_carried: Callable[[], None]) -> None:
        """Call `on_broken` with the reason when the queue pair breaks although the other side is there, and
        `on_carried` after each shard that arrived. Neither may use the connection."""
        ...


class PreparedQueuePair(Protocol):
    """A queue pair that waits for the other side's endpoint."""

    endpoint: QueuePairEndpoint

    def connect(self, tcp: Connection, remote: QueuePairEndpoint) -> UpgradedConnection:
        """Connect it, ready to send and to receive. The result owns `tcp`, and ends with it. If it raises, it is
        closed, and `tcp` is not."""
        ...

    def close(self) -> None:
        """It will not be connected."""
        ...


class QueuePairs(Protocol):
    """Makes queue pairs on this host's NICs. Thread-safe. Every method raises a FlyballError that says what this host
    lacks."""

    def prepare(self, peer: QueuePairEndpoint | None = None) -> PreparedQueuePair:
        """`peer`: the other side's, where it is known; ours is on a port that suits it."""
        ...

    def close(self) -> None: ...


class NoQueuePair(FlyballError):
    """There is no queue pair with this peer; the message says why. The TCP connection is as before."""

    code = "no_queue_pair"


class PathFailed(FlyballError):
    """Both sides have queue pairs, but nothing gets through. The connection is of no more use."""

    code = "rdma_path_failed"


def offer_queue_pair(
    connection: Connection, queue_pairs: QueuePairs, *, own_host: str, required: bool, key: bytes, timeout_s: float
) -> UpgradedConnection:
    """The connecting side. Returns the connection over the queue pair. Raises NoQueuePair, PathFailed, Unauthorized if
    the answer is not by who made the handshake, Unreachable, InvalidMessage."""
    peer = connection.peer.host_id
    try:
        ours = queue_pairs.prepare()
    except _NOT_MADE as error:
        raise NoQueuePair(reason_on(own_host, error), hint=_hint(error)) from error
    try:
        offer = OfferQueuePair(ours.endpoint, _proof(key, _offers(required), ours.endpoint, ""), required)
        answer = connection.request(offer, AnswerQueuePair, timeout_s=timeout_s)
        _check(answer.proof, _proof(key, "answers", answer.endpoint, answer.refusal), peer)
        if answer.endpoint is None:
            raise NoQueuePair(f"{peer}: {answer.refusal}", hint=f"see the log of {peer}'s engine")
    except BaseException:
        ours.close()
        raise
    try:
        upgraded = ours.connect(connection, answer.endpoint)
    except _NOT_MADE as error:
        raise PathFailed(reason_on(own_host, error), hint=_hint(error)) from error
    try:
        came_back = upgraded.request(_PROBE, PathProbe, timeout_s=timeout_s)
    except FlyballError as error:
        ended = has_ended(connection.fileno())
        upgraded.close()
        if ended:
            raise Unreachable(
                f"{peer} ended the connection while RDMA was tried out. {error.message}",
                hint=f"nothing to do if {peer}'s engine was ended: it is retried; else its log says why",
            ) from error
        raise PathFailed(
            f"Nothing gets through to {peer} over RDMA. {error.message}",
            hint="check that the network between the hosts carries RoCE (UDP port 4791) or InfiniBand, in full packets",
        ) from error
    if came_back != _PROBE:
        upgraded.close()
        raise PathFailed(f"{peer} sent something else back over RDMA than it was sent.")
    return upgraded


def answer_offer(
    connection: Connection,
    offer: OfferQueuePair,
    queue_pairs: QueuePairs,
    *,
    key: bytes,
    timeout_s: float,
    on_broken: Callable[[str], None],
    on_carried: Callable[[], None],
) -> UpgradedConnection:
    """The accepting side. Returns the connection over the queue pair, watched. Raises NoQueuePair after a refusal,
    Unauthorized if the offer is not by who made the handshake, Unreachable, InvalidMessage."""
    check_offer(connection, offer, key=key)
    try:
        ours = queue_pairs.prepare(offer.endpoint)
        upgraded = ours.connect(connection, offer.endpoint)
    except _NOT_MADE as error:
        reason = _reason(error)
        refuse_offer(connection, reason, key=key, timeout_s=timeout_s)
        raise NoQueuePair(reason, hint=_hint(error)) from error
    try:
        upgraded.watch(on_broken, on_carried)
        accept_offer(connection, ours.endpoint, key=key, timeout_s=timeout_s)
        upgraded.send(upgraded.receive(PathProbe, timeout_s=timeout_s), timeout_s=timeout_s)
    except BaseException:
        upgraded.close()
        raise
    return upgraded


def check_offer(connection: Connection, offer: OfferQueuePair, *, key: bytes) -> None:
    """Raise Unauthorized unless the offer is by who made the handshake."""
    _check(offer.proof, _proof(key, _offers(offer.required), offer.endpoint, ""), connection.peer.host_id)


def accept_offer(connection: Connection, endpoint: QueuePairEndpoint, *, key: bytes, timeout_s: float) -> None:
    """Answer a checked offer with the queue pair that is connected to it."""
    connection.send(AnswerQueuePair(_proof(key, "answers", endpoint, ""), endpoint), timeout_s=timeout_s)


def refuse_offer(connection: Connection, reason: str, *, key: bytes, timeout_s: float) -> None:
    """Answer a checked offer with the reason why this side stays with TCP."""
    reason = reason[:_MAX_REASON_CHARACTERS].removesuffix(".")
    connection.send(AnswerQueuePair(_proof(key, "answers", None, reason), None, reason), timeout_s=timeout_s)


def reason_on(host_id: str, error: Exception) -> str:
    """What a host lacks, as it is shown: "host-b: The port rxe0/1 is down"."""
    return f"{host_id}: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, FlyballError):
        return error.message.removesuffix(".")
    return f"The queue pair could not be made: {error or type(error).__name__}".removesuffix(".")


def _hint(error: Exception) -> str:
    return error.hint if isinstance(error, FlyballError) else "see the limits of the engine's process, and dmesg"


def _offers(required: bool) -> str:
    return "requires" if required else "offers"


def _check(shown: str, expected: str, peer: str) -> None:
    if not hmac.compare_digest(shown, expected):
        raise Unauthorized(
            f"A queue pair in the name of {peer} is not by who made the handshake.",
            hint="find out who changes what the hosts send each other",
        )


def _proof(key: bytes, role: str, endpoint: QueuePairEndpoint | None, refusal: str) -> str:
    return hmac.digest(key, wire.encode((role, endpoint, refusal)), "sha256").hex()
