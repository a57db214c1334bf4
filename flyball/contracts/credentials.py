"""The cluster's secret, the tokens derived from it, and the tokens of operators with a name.

Nothing is stored of those that are derived: the secret yields each, and none yields the secret or another one. The
secret is an operator's token, too. A host's token names its host, so a service knows the sender before it reads the
message. A derived token lets its owner guess a weak secret offline; the secrets that Flyball makes have 256 bits.
Tokens of operators with a name are random. A file has their digests.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping

import msgspec

from flyball.contracts.errors import ConfigurationError
from flyball.contracts.identity import NAME_PATTERN

HOST_PREFIX = "flyball-host."
READER_PREFIX = "flyball-reader."
PEERS_PREFIX = "flyball-peers."
OPERATOR_PREFIX = "flyball-operator."
PREFIXES = (HOST_PREFIX, READER_PREFIX, PEERS_PREFIX, OPERATOR_PREFIX)
MAX_TOKEN_LENGTH = 512

OPERATORS_FILE = "operators"  # in the supervisor's state folder
_DIGEST = re.compile(r"[0-9a-f]{64}")
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


class EngineKeys(msgspec.Struct, frozen=True):
    """What a host's engine needs to know the engines of a job's other hosts, and to be known by them."""

    answer: str = ""  # of this host; '': a supervisor of an earlier release gives none
    calls: Mapping[str, str] = {}  # by host

    def __repr__(self) -> str:
        return "EngineKeys()"  # never the keys


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


def engine_answer_key(secret: str, host_id: str) -> str:
    """The key with which a host's engine knows its callers. Only that host gets it."""
    return mac(secret.encode(), b"flyball engine answers v1:" + host_id.encode()).decode()


def engine_call_key(answer_key: str, job: str, caller: str) -> str:
    """The key with which the engine of host `caller` calls the engine that has `answer_key`, for a job of both. Only
    these two hosts get it. Names have no colon."""
    return mac(answer_key.encode(), b"flyball engine call v1:%b:%b" % (job.encode(), caller.encode())).decode()


def reader_token(secret: str) -> str:
    """A token that may read everything and change nothing."""
    return READER_PREFIX + mac(secret.encode(), b"flyball reader v1").decode()


def operator_token(name: str) -> str:
    """A new token for the operator with this name."""
    return f"{OPERATOR_PREFIX}{name}.{secrets.token_urlsafe(32)}"


def read_operators(text: str) -> dict[str, str]:
    """The digests of the tokens of operators, by name: one line each, NAME DIGEST. Raises ConfigurationError."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not re.fullmatch(NAME_PATTERN, words[0]) or not _DIGEST.fullmatch(words[1]):
            raise ConfigurationError(
                f"Line {number} of the operators' file is not NAME DIGEST.",
                hint="write it with `flyball token operator NAME`",
            )
        found[words[0]] = words[1]
    return found


def token_digest(token: bytes) -> str:
    """What the operators' file has of a token: SHA-256, as 64 characters. The token is random, so that is enough."""
    return hashlib.sha256(token).hexdigest()


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
