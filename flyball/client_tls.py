"""TLS for clients of the supervisor: how they verify it, and how they authenticate themselves."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flyball.contracts.errors import ConfigurationError

CA_VARIABLE = "FLYBALL_CA_FILE"
CERT_VARIABLE = "FLYBALL_CLIENT_CERT_FILE"
KEY_VARIABLE = "FLYBALL_CLIENT_KEY_FILE"


class ClientTls(msgspec.Struct, frozen=True):
    """PEM files; '' means not given."""

    ca_file: str = ""  # authorities to trust instead of the system's
    cert_file: str = ""  # for a supervisor that requires client certificates
    key_file: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ClientTls:
        return cls(environ.get(CA_VARIABLE, ""), environ.get(CERT_VARIABLE, ""), environ.get(KEY_VARIABLE, ""))

    def environment(self) -> dict[str, str]:
        """Environment variables with these settings, paths made absolute."""
        named = {CA_VARIABLE: self.ca_file, CERT_VARIABLE: self.cert_file, KEY_VARIABLE: self.key_file}
        return {name: str(Path(path).absolute()) for name, path in named.items() if path}

    def context(self, *, has_flags: bool = True) -> ssl.SSLContext:
        """The context for outgoing connections. Raises ConfigurationError naming the file at fault.

        `has_flags`: whether the command also has flags for these files, which hints then mention.
        """
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigurationError(
                "A client certificate needs its key, and the key its certificate.",
                hint=f"give both, with {_pair(has_flags=has_flags)}",
            )
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"The CA file {self.ca_file} cannot be used: {error.strerror or error}.",
                hint=f"give a PEM file with {_ca(has_flags=has_flags)}",
            ) from error
        if self.cert_file:
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
            except (OSError, ssl.SSLError, ValueError) as error:
                raise ConfigurationError(
                    f"The client certificate {self.cert_file} or its key {self.key_file} cannot be used: "
                    f"{getattr(error, 'strerror', None) or error}.",
                    hint="give two PEM files that belong together, the key without a password",
                ) from error
        return context


def plain_http() -> ssl.SSLContext:
    """A context that trusts nobody, for clients that never use TLS. By default, httpx would spend 20 to 50 ms reading
    the system's authorities."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _no_password() -> bytes:
    raise ValueError("the key has a password")


def _ca(*, has_flags: bool) -> str:
    return f"--ca-file or {CA_VARIABLE}" if has_flags else CA_VARIABLE


def _pair(*, has_flags: bool) -> str:
    variables = f"{CERT_VARIABLE} and {KEY_VARIABLE}"
    return f"--client-cert-file and --client-key-file or {variables}" if has_flags else variables


def tls_trouble(error: BaseException, *, hung_up: bool, has_flags: bool = True) -> tuple[str, str] | None:
    """The cause and the next step if a connection failed because of TLS, else None. `hung_up`: a TLS connection ended
    without a reply, which is how many servers refuse a client's certificate. `has_flags`: see `context`."""
    show_one = (
        f"if it requires client certificates, give one that its client CA signed, with {_pair(has_flags=has_flags)}"
    )
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if found is None:
        return ("it ended the connection without a reply", show_one) if hung_up else None
    if isinstance(found, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not accepted: {found.verify_message.rstrip('.')}",
            f"give the certificate of the authority that signed it, with {_ca(has_flags=has_flags)}; if it names "
            "another address or has expired, the supervisor needs a new one",
        )
    reason = (found.reason or str(found)).replace("_", " ").lower()
    if "certificate" in reason or "unknown ca" in reason:
        return f"it refuses this client: {reason}", show_one
    return f"TLS failed: {reason}", "check whether it uses TLS at all: http:// or https://"
