"""The cluster's secret and the tokens derived from it.

Nothing is stored: the secret yields every token, and no token yields the secret or another token. The secret is the
operator's token. A host's token names its host, so a service knows the sender before it reads the message. A derived
token lets its owner guess a weak secret offline; the secrets that Flyball makes have 256 bits.
"""

from __future__ import annotations

import base64
import hmac
import re

import msgspec

from flyball.contracts.errors import ConfigurationError
from flyball.contracts.identity import NAME_PATTERN

HOST_PREFIX = "flyball-host."
READER_PREFIX = "flyball-reader."
PEERS_PREFIX = "flyball-peers."
PREFIXES = (HOST_PREFIX, READER_PREFIX, PEERS_PREFIX)
MAX_TOKEN_LENGTH = 512

_HOST_TOKEN = re.compile(re.escape(HOST_PREFIX) + r"(.{1,63})\.[A-Za-z0-9_-]{43}\Z")


class HostCredential(msgspec.Struct, frozen=True):
    """A host's secrets: its token for the supervisor, and the key shared by the cluster's engines."""

    token: str
    peer_key: str

    def text(self) -> str:
        """The content of a token file."""
        return f"{self.token}\n{self.peer_key}\n"

    def __repr__(self) -> str:
        return "HostCredential()"  # never the token


def mac(secret: bytes, what: bytes) -> bytes:
    """256 bits that only the owner of the secret can compute, as 43 characters."""
    return base64.urlsafe_b64encode(hmac.digest(secret, what, "sha256"))[:-1]


def host_mac(secret: bytes, host_id: bytes, epoch: int = 0) -> bytes:
    """The secret part of a host's token. A new `epoch` makes a new token and withdraws the old one."""
    return mac(secret, b"flyball host v2:%d:%b" % (epoch, host_id) if epoch else b"flyball host v1:" + host_id)


def host_credential(secret: str, host_id: str, epoch: int = 0) -> HostCredential:
    """The credential of `host_id`, derived from the cluster's secret."""
    key = secret.encode()
    return HostCredential(
        token=f"{HOST_PREFIX}{host_id}.{host_mac(key, host_id.encode(), epoch).decode()}",
        peer_key=PEERS_PREFIX + mac(key, b"flyball engine peers v1").decode(),
    )


def reader_token(secret: str) -> str:
    """A token that may read everything and change nothing."""
    return READER_PREFIX + mac(secret.encode(), b"flyball reader v1").decode()


def read_credential(text: str, host_id: str) -> HostCredential:
    """Read a host's credential from its token file, which holds either the credential or the cluster's secret.

    Raises ConfigurationError if the file is empty, belongs to another host, or holds a token that no host can use.
    """
    words = text.split()
    if not words:
        raise ConfigurationError("The token file is empty.", hint=f"write one with `flyball token host {host_id}`")
    if not words[0].startswith(PREFIXES):
        return host_credential(words[0], host_id)
    found = _HOST_TOKEN.match(words[0])
    if (
        found is None
        or len(words) != 2
        or not words[1].startswith(PEERS_PREFIX)
        or not re.match(NAME_PATTERN, found[1])
    ):
        raise ConfigurationError(
            "The token file does not hold a host's token.", hint=f"write one with `flyball token host {host_id}`"
        )
    if found[1] != host_id:
        raise ConfigurationError(
            f"The token file belongs to host {found[1]!r}, but this is host {host_id!r}.",
            hint=f"write one with `flyball token host {host_id}`, or give --host-id {found[1]}",
        )
    return HostCredential(token=words[0], peer_key=words[1])
