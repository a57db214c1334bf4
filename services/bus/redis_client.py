"""Connections to Redis with bounded waits and readable errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from flyball.contracts.errors import ConfigurationError, FlyballError, Unreachable

TIMEOUT_S = 1.0  # for one connection attempt, and for one reply: less than the margin of the controller's lease
MIN_VERSION = (6, 2)  # XTRIM MINID
MAX_CONNECTIONS = 8

_HINT_URL = "use redis://user:password@host:6379/0, or rediss:// for TLS"

# Kind of failure -> class, message with {name} and {cause}, hint.
_EXPLANATIONS: dict[str, tuple[type[FlyballError], str, str]] = {
    "refused": (
        ConfigurationError,
        "Redis at {name} refuses this process: {cause}.",
        "check user and password in redis_url; docs/how-to/deploying.md lists the rights that the user needs",
    ),
    "untrusted": (
        ConfigurationError,
        "The certificate of Redis at {name} is not trusted: {cause}.",
        "add ?ssl_ca_certs=/path/to/ca.pem to redis_url, and use a host name that the certificate contains",
    ),
    "cluster": (
        ConfigurationError,
        "Redis at {name} is a node of a Redis Cluster, which moves keys between servers: {cause}.",
        "use a single Redis server, or a primary with replicas behind one address",
    ),
    "foreign": (
        ConfigurationError,
        "A key that Flyball needs in Redis at {name} is used by something else: {cause}.",
        "remove the key, or set another redis_prefix",
    ),
    "read_only": (
        Unreachable,
        "Redis at {name} takes no writes at present: {cause}.",
        "Flyball retries on a new connection; if this persists, point redis_url at the primary",
    ),
    "full": (
        Unreachable,
        "The memory of Redis at {name} is full: {cause}.",
        "raise its maxmemory, or remove other data; the hosts keep their signals meanwhile",
    ),
    "not_saved": (
        Unreachable,
        "Redis at {name} takes no writes because it cannot save to its disk: {cause}.",
        "free space there, or turn its snapshots off: the signal stream does not need them",
    ),
    "loading": (
        Unreachable,
        "Redis at {name} is loading its data.",
        "Flyball retries until it is done",
    ),
    "away": (
        Unreachable,
        "Redis at {name} does not answer: {cause}.",
        "check that it runs and is reachable; the hosts keep their signals meanwhile",
    ),
    "script": (
        ConfigurationError,
        "Redis at {name} rejects a command: {cause}.",
        "use Redis 6.2 or newer",
    ),
}

_KINDS: tuple[tuple[type[RedisError], str], ...] = (
    (AuthenticationError, "refused"),
    (AuthorizationError, "refused"),
    (NoPermissionError, "refused"),
    (BusyLoadingError, "loading"),
    (MovedError, "cluster"),
    (ReadOnlyError, "read_only"),
    (OutOfMemoryError, "full"),
)
# Failures inside a script, and in TLS, arrive as text only.
_WORDS: tuple[tuple[str, str], ...] = (
    ("CERTIFICATE_VERIFY_FAILED", "untrusted"),
    ("NOAUTH", "refused"),
    ("WRONGPASS", "refused"),
    ("NOPERM", "refused"),
    ("invalid password", "refused"),
    ("ACL failure", "refused"),
    ("can't run this command", "refused"),
    ("READONLY", "read_only"),
    ("read only replica", "read_only"),
    ("MASTERDOWN", "read_only"),
    ("NOREPLICAS", "read_only"),
    ("OOM", "full"),
    ("MISCONF", "not_saved"),
    ("LOADING", "loading"),
    ("BUSY", "away"),
    ("WRONGTYPE", "foreign"),
    ("equal or smaller than", "foreign"),
    ("MOVED", "cluster"),
    ("CROSSSLOT", "cluster"),
)


class RedisServer:
    """The Redis server of a URL. Thread-safe; connects at the first command."""

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError for a URL that is not a Redis URL. Never shows it, because of the password."""
        try:
            self.client = redis.Redis.from_url(
                url,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                socket_keepalive=True,
                # Retry once: a connection that was idle when the server restarted fails once. Never retry a timeout.
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
                max_connections=MAX_CONNECTIONS,
                protocol=2,
                client_name="flyball",
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError("Flyball cannot use this Redis URL.", hint=_HINT_URL) from error
        self.name = _name(self.client)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn errors inside the block into FlyballErrors."""
        try:
            yield
        except (RedisError, OSError) as error:
            kind = _kind(error)
            if kind in ("read_only", "refused"):
                # Another server may have taken over the address, but only new connections reach it.
                self.client.connection_pool.disconnect(inuse_connections=False)
            error_class, message, hint = _EXPLANATIONS[kind]
            cause = str(error).rstrip(".") or type(error).__name__
            raise error_class(message.format(name=self.name, cause=cause), hint=hint) from error

    def check(self) -> None:
        """Raise Unreachable if it does not answer, ConfigurationError if it is unsuitable for the stream."""
        with self.translated():
            about = self.client.info("server", "memory")
        version = str(about.get("redis_version", ""))
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_VERSION:
            raise ConfigurationError(f"Redis at {self.name} is version {version}.", hint="use Redis 6.2 or newer")
        policy = str(about.get("maxmemory_policy", ""))
        if int(about.get("maxmemory", 0)) > 0 and policy.startswith("allkeys-"):
            raise ConfigurationError(
                f"Redis at {self.name} is a cache: with maxmemory-policy {policy} it may evict signals.",
                hint="set maxmemory-policy to noeviction, or use another Redis",
            )

    def close(self) -> None:
        self.client.close()


def _kind(error: BaseException) -> str:
    for error_class, kind in _KINDS:
        if isinstance(error, error_class):
            return kind
    text = str(error)
    for word, kind in _WORDS:
        if word in text:
            return kind
    return "script" if isinstance(error, ResponseError) else "away"


def _name(client: redis.Redis) -> str:
    """Return the address without user and password."""
    where = client.connection_pool.connection_kwargs
    if "path" in where:
        return str(where["path"])
    return f"{where.get('host', 'localhost')}:{where.get('port', 6379)}/{where.get('db', 0)}"
