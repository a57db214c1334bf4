"""Tokens: whom they identify, what they permit, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clocks.manual import ManualClock

from flyball.contracts.credentials import (
    HostCredential,
    host_credential,
    operator_token,
    read_credential,
    reader_token,
    token_digest,
)
from flyball.contracts.errors import ConfigurationError, Forbidden, NotFound
from services.api.auth import ACCESS, DAEMONS, PUBLIC, READERS, REPORTERS, AccessTable, check_role
from services.runtime.http.auth import SESSION_S, Authenticator, PageSession, Principal, Role, session_digest
from services.runtime.http.operators import Operators
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
    of_session = {"session": SESSION.cookie.rpartition(".")[0], "logged_in_as": "operator"}
    assert AUTH.principal([cookie]) == Principal(Role.READER, **of_session)
    assert AUTH.principal([cookie, csrf]) == Principal(Role.OPERATOR, **of_session)
    assert AUTH.principal([cookie, (b"x-csrf-token", b"wrong")]) == Principal(Role.READER, **of_session)
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


def test_a_session_ends_by_age_and_by_logging_out() -> None:
    clock = ManualClock(1_000_000.0)
    auth = Authenticator(SECRET, clock=clock)
    first, second = auth.new_session(), auth.new_session()
    csrf = (b"x-csrf-token", first.csrf_token.encode())
    auth.end_session(session_digest(first.cookie.rpartition(".")[0]))
    assert auth.principal([cookie_of(first, auth), csrf]) is None
    assert auth.principal([cookie_of(second, auth)]) is not None
    clock.now_s += SESSION_S - 1
    assert auth.principal([cookie_of(second, auth)]) is not None
    clock.now_s += 2
    assert auth.principal([cookie_of(second, auth)]) is None
    made_by_another = Authenticator(SECRET, clock=ManualClock(clock.now_s + 1_000)).new_session()
    assert auth.principal([cookie_of(made_by_another, auth)]) is None, "its age could not be told"


def test_operators_have_names_and_tokens_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "operators"
    auth = Authenticator(SECRET, operators=Operators(file))
    alice, bob = operator_token("alice"), operator_token("b.ob")
    assert auth.principal(bearer(alice)) is None
    file.write_text(f"# people\nalice {token_digest(alice.encode())}\n\nb.ob {token_digest(bob.encode())}  # night\n")
    file.chmod(0o600)
    assert auth.principal(bearer(alice)) == Principal(Role.OPERATOR, name="alice")
    assert auth.principal(bearer(bob)) == Principal(Role.OPERATOR, name="b.ob")
    for wrong in (alice + "x", alice.replace("alice", "b.ob"), "flyball-operator.alice.", "flyball-operator."):
        assert auth.principal(bearer(wrong)) is None
    session = auth.new_session(Role.OPERATOR, "alice")
    csrf = (b"x-csrf-token", session.csrf_token.encode())
    principal = auth.principal([cookie_of(session, auth), csrf])
    assert principal is not None and (principal.role, principal.name) == (Role.OPERATOR, "alice")
    again = operator_token("alice")
    both = f"b.ob {token_digest(bob.encode())}\n"
    file.write_text(f"{both}alice {token_digest(again.encode())}\n")
    assert auth.principal([cookie_of(session, auth), csrf]) is None, "a new token ends the sessions of the former"
    session = auth.new_session(Role.OPERATOR, "alice")
    csrf = (b"x-csrf-token", session.csrf_token.encode())
    assert auth.principal([cookie_of(session, auth), csrf]) is not None
    file.write_text(both)
    assert auth.principal(bearer(alice)) is None and auth.principal(bearer(again)) is None, "it was taken back"
    assert auth.principal([cookie_of(session, auth), csrf]) is None, "and so were its sessions"
    assert auth.principal(bearer(bob)) is not None


def test_an_operators_file_that_others_may_write_counts_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "operators"
    alice = operator_token("alice")
    file.write_text(f"alice {token_digest(alice.encode())}\n")
    file.chmod(0o600)
    auth = Authenticator(SECRET, operators=Operators(file))
    assert auth.principal(bearer(alice)) is not None
    file.chmod(0o622)
    file.write_text(f"alice {token_digest(alice.encode())} \n")
    assert auth.principal(bearer(alice)) is None
    with pytest.raises(ConfigurationError, match="Others may write"):
        Operators(file)
    file.chmod(0o600)
    file.write_text("alice secret\n")
    with pytest.raises(ConfigurationError, match="Line 1"):
        Operators(file)


def test_whoever_shares_a_token_shares_its_limits() -> None:
    reader, other = Principal(Role.READER), Principal(Role.READER, session="s", logged_in_as="operator", name="alice")
    assert reader.users("10.0.0.1") == ("reader ", "reader  10.0.0.1")
    assert other.users("10.0.0.1") == ("operator alice", "operator alice s")


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
