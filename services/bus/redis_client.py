"""A connection to Redis: bounded waits, and failures in the words of a person."""

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

TIMEOUT_S = 1.0  # of one connection attempt, and of one answer: less than the margin of the controller's lease
MIN_VERSION = (6, 2)  # XTRIM MINID
MAX_CONNECTIONS = 8

_HINT_URL = "use redis://user:password@host:6379/0, or rediss:// for TLS"

# Kind of failure -> class, message (with {name} and {cause}), next step.
_EXPLANATIONS: dict[str, tuple[type[FlyballError], str, str]] = {
    "refused": (
        ConfigurationError,
        "Redis at {name} refuses this process: {cause}.",
        "check user, password and rights in redis_url: the user needs what docs/deploying.md names",
    ),
    "untrusted": (
        ConfigurationError,
        "The certificate of Redis at {name} is not trusted: {cause}.",
        "add ?ssl_ca_certs=/path/to/ca.pem to redis_url, and use a name that the certificate has",
    ),
    "cluster": (
        ConfigurationError,
        "Redis at {name} is a node of a Redis Cluster, which moves keys about: {cause}.",
        "use a Redis that is one server, or a primary with replicas behind one address",
    ),
    "foreign": (
        ConfigurationError,
        "A key of Flyball's in Redis at {name} is not Flyball's: {cause}.",
        "remove the key, or set another redis_prefix",
    ),
    "read_only": (
        Unreachable,
        "Redis at {name} takes no writes at present: {cause}.",
        "it is tried again, on a new connection; if it stays so, point redis_url at the primary",
    ),
    "full": (
        Unreachable,
        "The memory of Redis at {name} is full: {cause}.",
        "raise its maxmemory, or remove what else is in it; the hosts keep their signals meanwhile",
    ),
    "not_saved": (
        Unreachable,
        "Redis at {name} takes no writes because it cannot save to its disk: {cause}.",
        "free space there, or turn its snapshots off: the signal stream needs none",
    ),
    "loading": (
        Unreachable,
        "Redis at {name} is loading its data.",
        "it is tried again until it is done",
    ),
    "away": (
        Unreachable,
        "Redis at {name} does not answer: {cause}.",
        "check that it runs and can be reached; the hosts keep their signals meanwhile",
    ),
    "script": (
        ConfigurationError,
        "Redis at {name} cannot do what is asked of it: {cause}.",
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
# Inside a script, and in TLS, a failure comes back as text only.
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
    """One Redis, as named by a URL. Thread-safe; nothing is connected before the first command."""

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError for a URL that cannot mean a Redis; it is never shown, for its password."""
        try:
            self.client = redis.Redis.from_url(
                url,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                socket_keepalive=True,
                # A connection that was idle when the server restarted fails once; who waits for an answer waits once.
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
                max_connections=MAX_CONNECTIONS,
                protocol=2,
                client_name="flyball",
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError("The Redis URL is none that Flyball can use.", hint=_HINT_URL) from error
        self.name = _name(self.client)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """What goes wrong inside comes out as a FlyballError."""
        try:
            yield
        except (RedisError, OSError) as error:
            kind = _kind(error)
            if kind in ("read_only", "refused"):
                # Behind the same address another server may take over, but only for new connections.
                self.client.connection_pool.disconnect(inuse_connections=False)
            error_class, message, hint = _EXPLANATIONS[kind]
            cause = str(error).rstrip(".") or type(error).__name__
            raise error_class(message.format(name=self.name, cause=cause), hint=hint) from error

    def check(self) -> None:
        """Raise Unreachable if it does not answer, ConfigurationError if it is none that may carry the stream."""
        with self.translated():
            about = self.client.info("server", "memory")
        version = str(about.get("redis_version", ""))
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_VERSION:
            raise ConfigurationError(f"Redis at {self.name} is version {version}.", hint="use Redis 6.2 or newer")
        policy = str(about.get("maxmemory_policy", ""))
        if int(about.get("maxmemory", 0)) > 0 and policy.startswith("allkeys-"):
            raise ConfigurationError(
                f"Redis at {self.name} is a cache: with maxmemory-policy {policy} it may throw signals away.",
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
    """Where it is, without user and password."""
    where = client.connection_pool.connection_kwargs
    if "path" in where:
        return str(where["path"])
    return f"{where.get('host', 'localhost')}:{where.get('port', 6379)}/{where.get('db', 0)}"
