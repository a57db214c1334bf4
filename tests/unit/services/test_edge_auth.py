"""Tokens: whom they identify, what they permit, and what is refused."""

from __future__ import annotations

import pytest

from flyball.contracts.credentials import HostCredential, host_credential, read_credential, reader_token
from flyball.contracts.errors import ConfigurationError, Forbidden, NotFound
from services.api.auth import ACCESS, DAEMONS, PUBLIC, READERS, REPORTERS, AccessTable, check_role
from services.runtime.http.auth import Authenticator, PageSession, Principal, Role
from services.runtime.http.problem_details import MethodNotAllowed

SECRET = "the-secret-of-a-cluster"
AUTH = Authenticator(SECRET)
SESSION = AUTH.new_session()
TABLE = AccessTable(ACCESS)
OPERATOR, READER = Principal(Role.OPERATOR), Principal(Role.READER)


def bearer(token: str | bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + (token.encode() if isinstance(token, str) else token))]


def cookie_of(session: PageSession, auth: Authenticator = AUTH) -> tuple[bytes, bytes]:
    return b"cookie", f"x=1; {auth.cookie_name}={session.cookie}".encode()


def host(host_id: str, secret: str = SECRET) -> HostCredential:
    return host_credential(secret, host_id)


def test_each_token_stands_for_its_role() -> None:
    assert AUTH.principal(bearer(SECRET)) == OPERATOR
    assert AUTH.principal(bearer(reader_token(SECRET))) == READER
    for name in ("host-a", "a.b.c", "x" * 63):
        assert AUTH.principal(bearer(host(name).token)) == Principal(Role.DAEMON, name)
    cookie, csrf = cookie_of(SESSION), (b"x-csrf-token", SESSION.csrf_token.encode())
    session = SESSION.cookie.partition(".")[0]
    assert AUTH.principal([cookie]) == Principal(Role.READER, session=session)
    assert AUTH.principal([cookie, csrf]) == Principal(Role.OPERATOR, session=session)
    assert AUTH.principal([cookie, (b"x-csrf-token", b"wrong")]) == Principal(Role.READER, session=session)
    assert AUTH.principal([csrf]) is None, "without the cookie it is nothing"


def test_the_csrf_token_that_another_session_left_behind_changes_nothing() -> None:
    kept = (b"x-csrf-token", SESSION.csrf_token.encode())
    principal = AUTH.principal([cookie_of(AUTH.new_session()), kept])
    assert principal is not None and principal.role is Role.READER


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("x" * 100_000),
        bearer("tökén".encode("latin-1")),
        bearer(b"\xff\xfe\x00"),
        bearer(SECRET.upper()),
        bearer(SECRET + "x"),
        bearer("flyball-host."),
        bearer("flyball-host.."),
        bearer("flyball-host.host-a."),
        bearer(host("host-b").token.replace("host-b", "host-a")),
        bearer(host("host-a", "another-secret-of-16").token),
        bearer(host("host-a").peer_key),
        bearer("flyball-host." + "a" * 400 + "." + "A" * 43),
        bearer("flyball-reader." + "A" * 43),
        [(b"authorization", b"Basic " + SECRET.encode())],
        [(b"authorization", SECRET.encode())],
        [*bearer(SECRET), *bearer(SECRET)],
        [*bearer("wrong"), *bearer(SECRET)],
        [*bearer("wrong"), cookie_of(SESSION)],
        [(b"cookie", b"\xff=;;;==" + AUTH.cookie_name.encode())],
        [(b"cookie", f"{AUTH.cookie_name}={SECRET}".encode())],
        [(b"cookie", f"{AUTH.cookie_name}={SESSION.csrf_token}".encode())],
        [(b"cookie", f"{AUTH.cookie_name}=x{SESSION.cookie}".encode())],
        [(b"cookie", f"{AUTH.cookie_name}={SESSION.cookie.partition('.')[0]}.{SESSION.csrf_token}".encode())],
    ],
)
def test_what_is_no_token_gets_nobody_in(headers: list[tuple[bytes, bytes]]) -> None:
    assert AUTH.principal(headers) is None


def test_nothing_follows_from_a_derived_token() -> None:
    tokens = {host("a").token, host("b").token, host("a").peer_key, reader_token(SECRET), SESSION.cookie, SECRET}
    tokens.add(SESSION.csrf_token)
    parts = {token.rpartition(".")[2] for token in tokens}
    assert len(parts) == 7
    assert host("a").token not in repr(host("a"))


def test_one_hosts_token_can_be_withdrawn_and_replaced() -> None:
    strict = Authenticator(SECRET, ["a-former-secret-of-16"], {"host-a": 2})
    for withdrawn in (host("host-a"), host_credential(SECRET, "host-a", 1), host("host-a", "a-former-secret-of-16")):
        assert strict.principal(bearer(withdrawn.token)) is None
    assert strict.principal(bearer(host_credential(SECRET, "host-a", 2).token)) == Principal(Role.DAEMON, "host-a")
    assert strict.host_credential("host-a") == host_credential(SECRET, "host-a", 2)
    assert strict.principal(bearer(host("host-b").token)) == Principal(Role.DAEMON, "host-b")
    text = strict.host_credential("host-a").text()
    assert read_credential(text, "host-a").token == host_credential(SECRET, "host-a", 2).token


def test_a_former_secret_is_valid_while_it_is_configured() -> None:
    new = Authenticator("a-new-secret-of-16-or-more", [SECRET])
    assert new.principal(bearer(SECRET)) == OPERATOR
    assert new.principal(bearer(host("host-a").token)) == Principal(Role.DAEMON, "host-a")
    assert new.principal(bearer(reader_token(SECRET))) == READER
    cookie = cookie_of(new.new_session(), new)
    principal = new.principal([cookie])
    assert principal is not None and principal.role is Role.READER
    assert AUTH.principal([cookie]) is None


def test_readers_only_get() -> None:
    """Another site's page can make a browser send the cookie."""
    changing = {rule for rule, roles in ACCESS.items() if Role.READER in roles and rule[0] not in ("GET", "HEAD")}
    assert changing == {("POST", "/login"), ("POST", "/logout")}, "they change nothing but the browser's cookie"
    assert all(roles in (PUBLIC, READERS, DAEMONS, REPORTERS, {Role.OPERATOR}) for roles in ACCESS.values())


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/jobs", {"operator", "reader"}),
        ("POST", "/v1/jobs", {"operator"}),
        ("POST", "/v1/jobs/demo/stop", {"operator"}),
        ("POST", "/v1/hosts/host-a/token", {"operator"}),
        ("POST", "/v1/hosts/host-a/drain", {"operator"}),
        ("POST", "/v1/hosts/host-a/conditions", {"operator", "host-a"}),
        ("POST", "/v1/reports", {"host-a", "host-b"}),
        ("GET", "/v1/hosts/host-a/commands", {"host-a"}),
        ("POST", "/v1/hosts/host-a/updates", {"host-a"}),
    ],
)
def test_who_may_do_what(method: str, path: str, allowed: set[str]) -> None:
    principals = {
        "operator": OPERATOR,
        "reader": READER,
        "host-a": Principal(Role.DAEMON, "host-a"),
        "host-b": Principal(Role.DAEMON, "host-b"),
    }
    rule = TABLE.rule(method, path)
    for name, principal in principals.items():
        if name in allowed:
            check_role(principal, rule)
        else:
            with pytest.raises(Forbidden) as caught:
                check_role(principal, rule)
            assert caught.value.hint


@pytest.mark.parametrize(
    "path", ["/v1/secret", "/v1/jobs/", "/v1/jobs/a/b", "/v1/hosts//commands", "/v1/jobs\n", "//v1/jobs", "", "/v1"]
)
def test_a_path_without_a_rule_does_not_exist(path: str) -> None:
    with pytest.raises(NotFound):
        TABLE.rule("GET", path)


def test_a_method_without_a_rule_is_named_with_the_supported_ones() -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        TABLE.rule("DELETE", "/v1/jobs")
    assert caught.value.allowed == ["GET", "POST"]


def test_a_token_file_holds_a_hosts_credential_or_the_secret() -> None:
    credential = host("host-a")
    assert read_credential(credential.text(), "host-a") == credential
    assert read_credential(f"{SECRET}\n", "host-a") == credential
    with pytest.raises(ConfigurationError, match="belongs to host 'host-a'") as caught:
        read_credential(credential.text(), "host-b")
    assert "--host-id host-a" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        reader_token(SECRET),
        host("host-a").token,
        host("host-a").peer_key,
        "flyball-host.x",
        "flyball-host.A.",
    ],
)
def test_a_file_that_is_no_hosts_says_what_to_do(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_credential(text, "host-a")
    assert "flyball token host host-a" in caught.value.hint
    assert SECRET not in str(caught.value)
