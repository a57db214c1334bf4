"""The handshake on every connection: both sides prove that they have the same key without sending it. Which key it is,
`ckpt_engine.peers.transport.peer_keys` says: as a rule one that only these two hosts have.

A proof is an HMAC over both nonces, so it cannot be replayed; over the role, so it cannot be reflected; and over the
identity, so it cannot be used under another name. Both sides end with the same key of this one connection, with which
they prove what they agree on later.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence

import msgspec

from ckpt_engine.contracts.peer_wire import PEER_PROTOCOL, Challenge, Hello, Welcome
from ckpt_engine.peers.transport.port import Connection, Identity
from flyball.contracts.errors import InvalidMessage, Unauthorized, Unreachable

KeysOf = Callable[[str, str], Sequence[bytes]]  # of a caller, called for a job; Unauthorized


def introduce(connection: Connection, *, identity: Identity, token: bytes, timeout_s: float) -> bytes:
    """The connecting side; `identity` says for which job. Returns the connection's key. Raises Unauthorized unless both
    have the same token, Unreachable if the other side refuses for lack of room, InvalidMessage if it runs another
    release."""
    challenge = connection.receive(Challenge, timeout_s=timeout_s)
    if challenge.protocol != PEER_PROTOCOL:
        raise InvalidMessage(
            f"The other side speaks {challenge.protocol!r}, this engine speaks {PEER_PROTOCOL!r}.",
            hint="run the same release of Flyball on all hosts",
        )
    if challenge.refusal:
        raise Unreachable(
            f"The peer refused the connection: {challenge.refusal}",
            hint="nothing to do: it is retried while the generation runs",
        )
    nonce = secrets.token_hex(32)
    proof = _proof(token, "connects", challenge.nonce, nonce, identity)
    hello = Hello(identity.host_id, identity.address, identity.incarnation, nonce, proof, identity.job)
    connection.send(hello, timeout_s=timeout_s)
    try:
        welcome = connection.receive(Welcome, timeout_s=timeout_s)
    except Unreachable as error:
        raise Unauthorized(
            f"The peer closed the connection during the handshake: {error.message}",
            hint="use the same token on all hosts of the cluster",
        ) from error
    peer = Identity(welcome.host_id, "", welcome.incarnation, identity.job)
    if not hmac.compare_digest(welcome.proof, _proof(token, "accepts", challenge.nonce, nonce, peer)):
        raise Unauthorized("The peer has another token.", hint="use the same token on all hosts of the cluster")
    connection.peer = peer
    return _key(token, challenge.nonce, nonce)


def admit(
    connection: Connection, *, identity: Identity, keys_of: KeysOf, timeout_s: float, on_shown: Callable[[], None]
) -> bytes:
    """The accepting side. Returns the connection's key. Calls `on_shown` once the other side has proved that it has one
    of its keys, before it is answered. Raises Unauthorized without that proof, and whatever `on_shown` raises."""
    nonce = secrets.token_hex(32)
    connection.send(Challenge(PEER_PROTOCOL, nonce), timeout_s=timeout_s)
    hello = connection.receive(Hello, timeout_s=timeout_s)
    peer = Identity(hello.host_id, hello.address, hello.incarnation, hello.job)
    for token in keys_of(hello.host_id, hello.job):
        if hmac.compare_digest(hello.proof, _proof(token, "connects", nonce, hello.nonce, peer)):
            break
    else:
        raise Unauthorized(
            f"A caller that claims to be the engine of {hello.host_id} does not have the key.",
            hint="use the same token on all hosts of the cluster",
        )
    on_shown()
    accepting = Identity(identity.host_id, "", identity.incarnation, hello.job)
    proof = _proof(token, "accepts", nonce, hello.nonce, accepting)
    connection.send(Welcome(identity.host_id, identity.incarnation, proof), timeout_s=timeout_s)
    connection.peer = peer
    return _key(token, nonce, hello.nonce)


def refuse(connection: Connection, reason: str, *, timeout_s: float) -> None:
    """Send the reason instead of a challenge."""
    connection.send(Challenge(PEER_PROTOCOL, "0" * 64, reason), timeout_s=timeout_s)


def _key(token: bytes, acceptor_nonce: str, connector_nonce: str) -> bytes:
    return hmac.digest(token, _joined("key", acceptor_nonce, connector_nonce), "sha256")


def _proof(token: bytes, role: str, acceptor_nonce: str, connector_nonce: str, who: Identity) -> str:
    parts = (role, acceptor_nonce, connector_nonce, who.host_id, who.address, who.incarnation, who.job)
    return hmac.digest(token, _joined(*parts), "sha256").hex()


def _joined(*parts: str) -> bytes:
    """Such that no other parts give the same bytes, whatever characters are in them."""
    return msgspec.json.encode((PEER_PROTOCOL, *parts))
