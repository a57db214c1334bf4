"""TLS between real supervisors and clients: who is trusted, who is admitted, and which errors others get."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
import trustme
from support.servers.here import supervisor_in

from flyball.cli.reach.client import ApiClient
from flyball.client_tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, ClientTls
from flyball.contracts.clock import SystemClock
from flyball.contracts.credentials import host_credential
from flyball.contracts.errors import ConfigurationError, Unreachable
from host_daemon.link.http_client import Endpoints, SupervisorClient
from services.actuator.backends import host_daemons
from services.main import Supervisor
from services.settings import load_settings

YESTERDAY = datetime.now(UTC) - timedelta(days=1)


class Files:
    """Creates PEM files of authorities and certificates for a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self.ca = trustme.CA()
        self.other_ca = trustme.CA()

    def authority(self, ca: trustme.CA) -> str:
        path = self._folder / f"ca-{id(ca)}.pem"
        ca.cert_pem.write_to_path(path)
        return str(path)

    def certificate(
        self, ca: trustme.CA, name: str = "127.0.0.1", not_after: datetime | None = None
    ) -> tuple[str, str]:
        made = ca.issue_cert(name, not_after=not_after, key_type=trustme.KeyType.ECDSA)
        stem = self._folder / f"{next(self._numbers)}"
        cert, key = stem.with_suffix(".crt"), stem.with_suffix(".key")
        for number, blob in enumerate(made.cert_chain_pems):
            blob.write_to_path(cert, append=number > 0)
        made.private_key_pem.write_to_path(key)
        return str(cert), str(key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    monkeypatch.setattr(host_daemons, "FIRST_LOOK_S", 120.0)  # beyond that, a poll is refused even for admitted clients
    with ExitStack() as running:

        def start(certificate: tuple[str, str], client_ca: str | None = None) -> Supervisor:
            cert, key = certificate
            tls = {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": client_ca}
            return running.enter_context(supervisor_in(tmp_path / "supervisor", **tls))

        yield start


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClientTls]:
    """Sets the variables of the command line's client; the daemon's client gets the same values."""

    def choose(ca: str = "", certificate: tuple[str, str] = ("", "")) -> ClientTls:
        for name, value in zip((CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE), (ca, *certificate), strict=True):
            monkeypatch.setenv(name, value)
        return ClientTls(ca, *certificate)

    return choose


def ask(supervisor: Supervisor) -> object:
    with ApiClient(supervisor.url, supervisor.token) as client:
        return client.get("/v1/jobs")


def poll(supervisor: Supervisor, tls: ClientTls) -> object:
    async def once() -> object:
        credential = host_credential(supervisor.token, "host-a")
        servers = Endpoints([supervisor.url], "host-a", SystemClock())
        client = SupervisorClient(servers, servers, lambda: credential.token, tls)
        try:
            return await client.commands("host-a", "i", wait_s=0.0)
        finally:
            await client.close()

    return asyncio.run(once())


def refusals(supervisor: Supervisor, tls: ClientTls) -> list[Unreachable]:
    """The errors of both clients."""
    with pytest.raises(Unreachable) as operator:
        ask(supervisor)
    with pytest.raises(Unreachable) as daemon:
        poll(supervisor, tls)
    return [operator.value, daemon.value]


def test_who_trusts_the_authority_gets_in_and_others_learn_why_not(
    files: Files, serve: Callable[..., Supervisor], trust: Callable[..., ClientTls]
) -> None:
    supervisor = serve(files.certificate(files.ca))
    assert supervisor.url.startswith("https://")
    tls = trust(files.authority(files.ca))
    assert ask(supervisor)
    assert poll(supervisor, tls)
    for ca in (files.authority(files.other_ca), ""):  # '': the system's authorities
        operator, daemon = refusals(supervisor, trust(ca))
        for error in (operator, daemon):
            assert "certificate is not accepted" in error.message
            assert "FLYBALL_CA_FILE" in error.hint
        assert "--ca-file" in daemon.hint
        assert "--" not in operator.hint  # `flyball status` and most others have no such flag


@pytest.mark.parametrize("wrong", ["expired", "another address"])
def test_a_certificate_that_is_not_good_now_and_here_is_refused(
    files: Files, serve: Callable[..., Supervisor], trust: Callable[..., ClientTls], wrong: str
) -> None:
    expired = wrong == "expired"
    certificate = files.certificate(files.ca, "127.0.0.1" if expired else "10.9.9.9", YESTERDAY if expired else None)
    supervisor = serve(certificate)
    for error in refusals(supervisor, trust(files.authority(files.ca))):
        assert ("expired" if expired else "IP address mismatch") in error.message
        assert "needs a new one" in error.hint


def test_with_a_client_authority_a_certificate_is_needed_and_the_token_still_decides(
    files: Files, serve: Callable[..., Supervisor], trust: Callable[..., ClientTls]
) -> None:
    ca = files.authority(files.ca)
    supervisor = serve(files.certificate(files.ca), ca)
    tls = trust(ca, files.certificate(files.ca, "host-a"))
    assert ask(supervisor)
    assert poll(supervisor, tls)
    with (
        ApiClient(supervisor.url, "not-the-token-of-it") as client,
        pytest.raises(Exception, match="rejects the token"),
    ):
        client.get("/v1/jobs")
    for certificate in (
        ("", ""),
        files.certificate(files.other_ca, "host-a"),
        files.certificate(files.ca, "host-a", YESTERDAY),
    ):
        for error in refusals(supervisor, trust(ca, certificate)):
            assert "ended the connection" in error.message or "refuses this client" in error.message
            assert "FLYBALL_CLIENT_CERT_FILE" in error.hint


def test_files_that_cannot_be_used_are_named(files: Files, tmp_path: Path, trust: Callable[..., ClientTls]) -> None:
    cert, _ = files.certificate(files.ca)
    _, other_key = files.certificate(files.ca)
    with pytest.raises(ConfigurationError, match="nowhere"):
        ClientTls(ca_file="/nowhere").context()
    with pytest.raises(ConfigurationError, match="needs its key"):
        ClientTls(cert_file=cert).context()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        ClientTls(cert_file=cert, key_file=other_key).context()
    with pytest.raises(ConfigurationError, match="protects nothing"):
        load_settings(state_dir=tmp_path, tls_client_ca_file=cert)
    with pytest.raises(ConfigurationError, match="both a certificate and a key"):
        load_settings(state_dir=tmp_path, tls_cert_file=cert)
    broken = tmp_path / "broken.pem"
    broken.write_text("no PEM")
    settings = load_settings(
        state_dir=tmp_path / "s", port=0, tls_cert_file=cert, tls_key_file=other_key, tls_client_ca_file=broken
    )
    with pytest.raises(ConfigurationError, match="TLS certificate or key"):
        Supervisor(settings).start()


def test_who_listens_beyond_the_machine_without_tls_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings_at(host: str) -> list[str]:
        caplog.clear()
        with supervisor_in(tmp_path / host, host=host, log_level="warning"):
            pass
        log = (tmp_path / host / "supervisor.log").read_text()
        return [line for line in log.splitlines() if "unencrypted" in line]

    with caplog.at_level(logging.WARNING):
        assert len(warnings_at("0.0.0.0")) == 1
        assert warnings_at("127.0.0.1") == []
