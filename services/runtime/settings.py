"""Every setting of the supervisor: one class, read from arguments, then `FLYBALL_*` variables, then defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from flyball.contracts.errors import ConfigurationError
from services.controller.view import PolicySettings
from services.sensor.fault_detector import DetectorSettings

ENV_PREFIX = "FLYBALL_"
MIN_TOKEN_LENGTH = 16

S = TypeVar("S", bound=msgspec.Struct)


def default_state_dir() -> Path:
    """Where a supervisor keeps its files unless told otherwise."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "flyball" / "supervisor"


class Settings(BaseSettings):
    """`FLYBALL_PORT=8080` sets `port`, `FLYBALL_POLICY__ROOT_CAUSE_WINDOW_S=1.5` one number of the policy."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_ignore_empty=True, frozen=True, extra="forbid"
    )

    state_dir: Path = Field(default_factory=default_state_dir)
    database_url: str = ""  # '': SQLite in the state folder
    host: str = "127.0.0.1"
    port: int = Field(default=7370, ge=0, le=65_535)  # 0: any free port
    token: SecretStr = SecretStr("")  # '': from the state folder, made at the first start
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    log_target: Literal["file", "stderr"] = "file"  # file: supervisor.log in the state folder, rotated
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    report_queue_size: int = Field(default=1024, ge=1)  # reports that wait for the database
    report_queue_size_bytes: int = Field(default=64 << 20, ge=1 << 20)
    detector_tick_s: float = Field(default=0.05, gt=0.0, le=1.0)
    lease_ttl_s: float = Field(default=3.0, gt=0.2)
    poll_interval_s: float = Field(default=0.1, gt=0.0, le=5.0)  # where no other process can wake this one
    max_waiting_polls: int = Field(default=4096, ge=1)
    max_streams: int = Field(default=64, ge=1)
    start_timeout_s: float = Field(default=30.0, gt=0.0)
    drain_timeout_s: float = Field(default=10.0, gt=0.0)

    policy: dict[str, Any] = Field(default_factory=dict)  # fields of PolicySettings
    detector: dict[str, Any] = Field(default_factory=dict)  # fields of DetectorSettings

    @field_validator("token")
    @classmethod
    def _token_is_long_enough(cls, token: SecretStr) -> SecretStr:
        if 0 < len(token.get_secret_value()) < MIN_TOKEN_LENGTH:
            raise ValueError(f"needs at least {MIN_TOKEN_LENGTH} characters")
        return token

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.state_dir.resolve() / 'flyball.sqlite'}"

    @property
    def policy_settings(self) -> PolicySettings:
        """The policy's numbers, with those of `policy` in place of the defaults."""
        return _convert(self.policy, PolicySettings, "policy")

    @property
    def detector_settings(self) -> DetectorSettings:
        """The fault detector's numbers, with those of `detector` in place of the defaults."""
        return _convert(self.detector, DetectorSettings, "detector")


def _convert(numbers: dict[str, Any], kind: type[S], setting: str) -> S:
    try:
        return msgspec.convert(numbers, kind, strict=False)  # a number from the environment is a string
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ConfigurationError(f"The setting {setting} is wrong: {error}.", hint=f"it takes: {known}") from error


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 - validated field by field
    """Settings from keyword arguments (those that are None do not count) and the environment.

    Raises ConfigurationError that names the wrong settings, and never shows a value: it may be a secret.
    """
    try:
        settings = Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise ConfigurationError(
            f"Wrong settings: {wrong}.", hint=f"correct the flag or the {ENV_PREFIX}... variable of that name"
        ) from error
    if (settings.tls_cert_file is None) != (settings.tls_key_file is None):
        raise ConfigurationError(
            "TLS needs both a certificate and a key.", hint="set tls_cert_file and tls_key_file, or neither"
        )
    _ = settings.policy_settings, settings.detector_settings  # so that a wrong number is found before anything starts
    return settings
