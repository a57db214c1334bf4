"""The supervisor's settings, from arguments, then `FLYBALL_*` variables, then defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from flyball.contracts import wire
from flyball.contracts.credentials import MAX_TOKEN_LENGTH, PREFIXES
from flyball.contracts.errors import ConfigurationError
from flyball.contracts.identity import NAME_PATTERN
from services.api.outgoing.traces import parse_headers
from services.api.outgoing.webhook import check_url
from services.controller.round.view import PolicySettings
from services.record.retention_rules import RetentionSettings
from services.sensor.detector.fault_detector import DetectorSettings

ENV_PREFIX = "FLYBALL_"
FROM_FILES = ("token", "former_token", "database_url", "redis_url", "webhook_secret")  # also as FLYBALL_TOKEN_FILE
MIN_TOKEN_LENGTH = 16

HostName = Annotated[str, Field(pattern=NAME_PATTERN)]
TokenEpoch = Annotated[int, Field(ge=0, lt=2**31)]

S = TypeVar("S", bound=msgspec.Struct)


def default_state_dir() -> Path:
    """Return the default folder for a supervisor's files."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "flyball" / "supervisor"


class Settings(BaseSettings):
    """`FLYBALL_PORT=8080` sets `port`; `FLYBALL_POLICY__ROOT_CAUSE_WINDOW_S=1.5` sets one number of the policy."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_ignore_empty=True, frozen=True, extra="forbid"
    )

    state_dir: Path = Field(default_factory=default_state_dir)  # of database, token and log
    database_url: str = ""  # '': SQLite in the state folder
    redis_url: str = ""  # redis:// or rediss://user:password@host:6379/0; '': signals go through the database
    redis_prefix: str = Field(default="flyball", pattern=r"^[A-Za-z0-9._:{}-]{1,64}$")  # distinct for each cluster
    host: str = "127.0.0.1"  # to listen on; 0.0.0.0: all addresses
    port: int = Field(default=7370, ge=0, le=65_535)  # 0: any free port
    token: SecretStr = SecretStr("")  # the cluster's secret; '': from the state folder, created at the first start
    former_token: SecretStr = SecretStr("")  # also valid while a new one is rolled out; '': the file token.former
    host_token_epochs: dict[HostName, TokenEpoch] = Field(default_factory=dict)  # {"node-7": 1} withdraws its first
    tls_cert_file: Path | None = None  # PEM; with tls_key_file it serves https://
    tls_key_file: Path | None = None  # PEM, of that certificate
    tls_client_ca_file: Path | None = None  # admits only clients with a certificate that it signed

    log_target: Literal["file", "stderr"] = "file"  # file: supervisor.log in the state folder, rotated
    log_format: Literal["json", "console"] = "json"  # console: for people
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # and worse

    lease_ttl_s: float = Field(default=3.0, gt=0.2)  # a leader that is gone is replaced after this long
    max_waiting_polls: int = Field(default=16_384, ge=1)  # hosts that wait for commands; each holds a connection
    max_requests_per_s: float = Field(default=200.0, ge=0.0)  # of one token or login and address; daemons have no limit
    start_timeout_s: float = Field(default=30.0, gt=0.0)  # not ready by then: it ends with an error
    drain_timeout_s: float = Field(default=10.0, gt=0.0)  # at its end, for requests in progress

    webhook_url: str = ""  # gets the story of every job that failed, and every incident that was given up; '': none
    webhook_secret: SecretStr = SecretStr("")  # signs these requests

    # Collector that gets a trace of each closed incident (OTLP/HTTP); also OTEL_EXPORTER_OTLP_ENDPOINT. none: nobody
    otlp_endpoint: str = ""
    otlp_headers: SecretStr = SecretStr("")  # name=value,name=value for it; also OTEL_EXPORTER_OTLP_HEADERS

    simulations_dir: Path | None = None  # results of `flyball simulate run -o json` to show; unset: in the state folder

    policy: dict[str, Any] = Field(default_factory=dict)  # fields of PolicySettings
    detector: dict[str, Any] = Field(default_factory=dict)  # fields of DetectorSettings
    retention: dict[str, Any] = Field(default_factory=dict)  # fields of RetentionSettings

    @field_validator("token", "former_token")
    @classmethod
    def _token_is_usable(cls, token: SecretStr) -> SecretStr:
        text = token.get_secret_value()
        if 0 < len(text) < MIN_TOKEN_LENGTH:
            raise ValueError(f"needs at least {MIN_TOKEN_LENGTH} characters")
        if len(text) > MAX_TOKEN_LENGTH or not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError(f"needs at most {MAX_TOKEN_LENGTH} printable ASCII characters without spaces")
        if text.startswith(PREFIXES):
            raise ValueError("is a host's or a reader's token; set the cluster's secret here")
        return token

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.state_dir.resolve() / 'flyball.sqlite'}"

    @property
    def policy_settings(self) -> PolicySettings:
        """The policy's numbers: `policy` over the defaults."""
        return _convert(self.policy, PolicySettings, "policy")

    @property
    def detector_settings(self) -> DetectorSettings:
        """The fault detector's numbers: `detector` over the defaults."""
        return _convert(self.detector, DetectorSettings, "detector")

    @property
    def retention_settings(self) -> RetentionSettings:
        """How long history is kept: `retention` over the defaults."""
        return _convert(self.retention, RetentionSettings, "retention")


def _convert(numbers: dict[str, Any], kind: type[S], setting: str) -> S:
    try:
        return wire.convert(numbers, kind, strict=False)  # a number from the environment is a string
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ConfigurationError(f"The setting {setting} is wrong: {error}.", hint=f"it takes: {known}") from error


def _read_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that variables name files for, by setting."""
    variables = {name.upper(): value for name, value in environ.items()}
    found: dict[str, str] = {}
    for name in FROM_FILES:
        variable = ENV_PREFIX + name.upper()
        path = variables.get(f"{variable}_FILE")
        if not path or variables.get(variable):
            continue
        try:
            found[name] = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"The file {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}.",
                hint=f"correct {variable}_FILE, or set {variable}",
            ) from error
        if not found[name]:
            raise ConfigurationError(f"The file {path} is empty.", hint=f"write the secret to it, or set {variable}")
    return found


def _of_opentelemetry(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what OpenTelemetry's own variables say, unless ours do."""
    found = {name: environ.get(f"OTEL_EXPORTER_{name.upper()}", "") for name in ("otlp_endpoint", "otlp_headers")}
    return {name: value for name, value in found.items() if value and not environ.get(f"{ENV_PREFIX}{name.upper()}")}


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 - validated field by field
    """Return the settings from keyword arguments and the environment; arguments that are None are ignored.

    `FLYBALL_TOKEN_FILE` names a file with the token, unless `FLYBALL_TOKEN` is set; likewise for all of `FROM_FILES`.
    Raises a ConfigurationError that names wrong settings but never shows values, which may be secret.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        settings = Settings(**{**_of_opentelemetry(os.environ), **_read_files(os.environ), **given})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise ConfigurationError(
            f"Wrong settings: {wrong}.", hint=f"correct the flag or the {ENV_PREFIX}... variable of that name"
        ) from error
    except SettingsError as error:  # a variable that must hold JSON; the message names the setting
        raise ConfigurationError(
            f"Wrong settings: {error}.", hint=f"correct the {ENV_PREFIX}... variable of that name: it takes JSON"
        ) from error
    if (settings.tls_cert_file is None) != (settings.tls_key_file is None):
        raise ConfigurationError(
            "TLS needs both a certificate and a key.", hint="set tls_cert_file and tls_key_file, or neither"
        )
    if settings.tls_client_ca_file is not None and settings.tls_cert_file is None:
        raise ConfigurationError(
            "A client CA without TLS protects nothing.", hint="set tls_cert_file and tls_key_file too"
        )
    if settings.webhook_url:
        check_url(settings.webhook_url)
    if settings.otlp_endpoint:
        check_url(settings.otlp_endpoint, "otlp_endpoint")
        parse_headers(settings.otlp_headers.get_secret_value())
    # Convert now, so that a wrong number is found before anything starts.
    _ = settings.policy_settings, settings.detector_settings, settings.retention_settings
    return settings
