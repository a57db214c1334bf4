"""Authentication of requests. Independent of FastAPI, because the sensor's hot path uses it too."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from enum import StrEnum
from http.cookies import CookieError, SimpleCookie
from types import MappingProxyType

import msgspec

from flyball.contracts.clock import Clock, SystemClock
from flyball.contracts.credentials import (
    HOST_PREFIX,
    MAX_TOKEN_LENGTH,
    HostCredential,
    host_credential,
    host_mac,
    mac,
    reader_token,
)
from services.runtime.http.operators import Operators

SESSION_S = 12 * 3600.0  # a browser's login; then its user logs in again
MAX_ENDED = 10_000  # sessions that were logged out; the newest
CSRF_HEADER = b"x-csrf-token"
_HOST_PREFIX = HOST_PREFIX.encode()
_MAX_HOST_ID_LENGTH = 63

RawHeaders = Iterable[tuple[bytes, bytes]]  # as ASGI has them: names in lower case


class Role(StrEnum):
    READER = "reader"  # reads everything, changes nothing
    OPERATOR = "operator"  # also submits and stops jobs, drains hosts, hands out tokens
    DAEMON = "daemon"  # acts for its own host only


class Principal(msgspec.Struct, frozen=True):
    """The owner of a token. `host_id` is set for daemons only."""

    role: Role
    host_id: str = ""
    session: str = ""  # of a browser that logged in; '': a token was sent
    name: str = ""  # of an operator with a token of his own; '': the token is shared
    logged_in_as: str = ""  # the role of the token that `session` began with: its cookie alone may only read

    def users(self, client: str) -> tuple[str, str]:
        """Who shares limits: the owners of one token, and of these, one browser, or one program's address."""
        owner = f"{self.logged_in_as or self.role.value} {self.name}"
        return owner, f"{owner} {self.session or client}"


_OPERATOR = Principal(Role.OPERATOR)
_READER = Principal(Role.READER)


class PageSession(msgspec.Struct, frozen=True):
    """What a browser gets when somebody logs in.

    Browsers send the cookie to every port of a host, so other programs there may see it: it grants reading only. An
    operator's browser sends the CSRF token beside it. That one lies in the storage of the page's origin, which has the
    port in its name: what gets the cookie, another program or another site's form, does not get the CSRF token. The
    storage outlives the cookie, so the token is of this session only: the next one may be a reader's.
    """

    cookie: str
    csrf_token: str


def session_digest(session: str) -> str:
    """What is kept of a session that was logged out."""
    return hashlib.sha256(session.encode()).hexdigest()[:32]


class _Secret:
    """A cluster secret and the reader's token derived from it."""

    def __init__(self, secret: str) -> None:
        self.key = secret.encode()
        self.reader = reader_token(secret).encode()


class Authenticator:
    """Compares in constant time. Keeps no table of hosts: a host's token is derived from its name.

    `former`: secrets that stay valid while a new one is rolled out. `host_epochs`: host -> valid token epoch, for hosts
    whose first token was withdrawn. `operators`: those with names.
    """

    def __init__(
        self,
        secret: str,
        former: Iterable[str] = (),
        host_epochs: Mapping[str, int] = MappingProxyType({}),
        operators: Operators | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._operators = operators or Operators()
        self._clock = clock or SystemClock()
        self._ended: dict[str, None] = {}  # digests of sessions that were logged out, oldest first
        self._host_epochs = {host_id.encode(): epoch for host_id, epoch in host_epochs.items()}
        self._secrets = [_Secret(text) for text in (secret, *former)]
        self.reader_token = reader_token(secret)
        # Two supervisors on one host must not overwrite each other's cookie.
        named = mac(self._secrets[0].key, b"flyball page cookie v1")
        self.cookie_name = f"flyball-{hashlib.sha256(named).hexdigest()[:8]}"

    def new_session(self, role: Role = Role.OPERATOR, name: str = "") -> PageSession:
        """Return a session of a browser, for the owner of a token. It ends with the browser, with the secret, by
        logging out (`end_session`), and after SESSION_S."""
        session = f"{secrets.token_urlsafe(16)}.{int(self._clock.wall_s())}.{role.value}.{name}".encode()
        cookie = b"%b.%b" % (session, self._session_mac(b"cookie", session))
        return PageSession(cookie.decode(), self._session_mac(b"operator", session).decode())

    def end_session(self, digest: str) -> None:
        """Refuse the session with this `session_digest` from now on."""
        self._ended[digest] = None
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def host_credential(self, host_id: str) -> HostCredential:
        """Return the credential with which this host authenticates."""
        return host_credential(self._secrets[0].key.decode(), host_id, self.host_epoch(host_id))

    def host_epoch(self, host_id: str) -> int:
        """Return the epoch of the host's valid token; 0: its first."""
        return self._host_epochs.get(host_id.encode(), 0)

    def principal(self, headers: RawHeaders) -> Principal | None:
        """Identify the sender by the Authorization header or, without one, the page's cookie: a reader, and with the
        CSRF token an operator. None: unknown."""
        bearer: bytes | None = None
        csrf = b""
        cookies: list[bytes] = []
        for name, value in headers:
            if name == b"authorization":
                if bearer is not None:
                    return None  # a proxy may have checked the other one
                bearer = value
            elif name == b"cookie":
                cookies.append(value)
            elif name == CSRF_HEADER:
                csrf = value
        if bearer is not None:
            scheme, _, token = bearer.partition(b" ")
            return self.owner(token.strip()) if scheme.lower() == b"bearer" else None
        session = next(filter(None, map(self._session_in, cookies)), b"")
        if not session:
            return None
        is_operator = hmac.compare_digest(self._session_mac(b"operator", session), csrf)
        text = session.decode("ascii")
        _, _, logged_in_as, owner = text.split(".", 3)
        role = Role.OPERATOR if is_operator else Role.READER
        return Principal(role, session=text, name=owner, logged_in_as=logged_in_as)

    def owner(self, token: bytes) -> Principal | None:
        """Return the owner of a token, None if it is not valid."""
        if len(token) > MAX_TOKEN_LENGTH:
            return None
        if token.startswith(_HOST_PREFIX):
            host_id, _, given = token[len(_HOST_PREFIX) :].rpartition(b".")
            if 0 < len(host_id) <= _MAX_HOST_ID_LENGTH and host_id.isascii():
                epoch = self._host_epochs.get(host_id, 0)
                for secret in self._secrets:
                    if hmac.compare_digest(host_mac(secret.key, host_id, epoch), given):
                        return Principal(Role.DAEMON, host_id.decode())
            return None
        for secret in self._secrets:
            if hmac.compare_digest(secret.key, token):
                return _OPERATOR
            if hmac.compare_digest(secret.reader, token):
                return _READER
        name = self._operators.owner(token)
        return Principal(Role.OPERATOR, name=name) if name else None

    def _session_in(self, header: bytes) -> bytes:
        """Return the session that a Cookie header belongs to, b"" if to none."""
        try:
            cookie = SimpleCookie(header.decode("latin-1")).get(self.cookie_name)
        except CookieError:
            return b""
        session, _, given = (cookie.value if cookie else "").encode().rpartition(b".")
        if not hmac.compare_digest(self._session_mac(b"cookie", session), given):
            return b""
        return session if self._is_open(session.decode("ascii")) else b""

    def _is_open(self, session: str) -> bool:
        """Whether a session that was made here has not ended."""
        began = session.split(".", 2)[1]
        if not -60.0 <= self._clock.wall_s() - int(began) < SESSION_S:  # another replica's clock may be ahead
            return False
        return session_digest(session) not in self._ended

    def _session_mac(self, what: bytes, session: bytes) -> bytes:
        """A named operator's session is of the present token: it ends when that is taken back or made anew."""
        parts = session.split(b".", 3)
        name = parts[3].decode("ascii", "replace") if len(parts) == 4 else ""
        token = self._operators.digest_of(name).encode() if name else b""
        return mac(self._secrets[0].key, b"flyball page %b v4:%b:%b" % (what, token, session))
