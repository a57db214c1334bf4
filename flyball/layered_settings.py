"""Merges settings from several sources into one typed struct. Pure: the sources are mappings.

A flag overrides a variable, a variable the file, and the file the default. Sizes may be written as "8GiB" or "200MB";
durations are in seconds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from flyball.contracts import wire
from flyball.contracts.errors import ConfigurationError, FlyballError, UsageError

T = TypeVar("T", bound=msgspec.Struct)

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?(?:/s)?\s*", re.IGNORECASE)
_WORDS = {"on": "true", "yes": "true", "off": "false", "no": "false"}

PREFIX = "FLYBALL_"
# What all parts read, without the prefix; a test compares. Beside them are those that begin with one of _FAMILIES.
VARIABLES = """
    actuator_urls address attached beacon ca_file checkpoint client_cert_file client_key_file cloud_notices
    conditions_dir database_url database_url_file detector drain_timeout_s engine_notify events fabric failure_domain
    fault_point former_token former_token_file generation host host_id host_token_epochs inject job lease_ttl_s
    leave_timeout_s lineage log_format log_level log_target max_requests_per_s max_waiting_polls metadata_url obeys
    otlp_endpoint otlp_headers policy port probe_interval_s probe_root redis_prefix redis_url redis_url_file
    report_interval_s restore_step retention run sensor_urls shm_dir shm_prefix simulations_dir start_timeout_s
    state_dir supervisor tls_cert_file tls_client_ca_file tls_key_file token token_file trusted_network wall_clock
    warm_nproc webhook_secret webhook_secret_file webhook_url worker worker_user
""".upper().split()
_FAMILIES = ("CKPT_", "POLICY__", "DETECTOR__", "RETENTION__")  # CKPT_ is checked by the engine's settings


def unread_variables(environ: Iterable[str]) -> list[str]:
    """Say of each FLYBALL_* variable that no part reads which one was probably meant."""
    said = []
    for name in sorted(environ):
        own = name.upper().removeprefix(PREFIX)
        if not name.upper().startswith(PREFIX) or own in VARIABLES or own.startswith(_FAMILIES):
            continue
        near = difflib.get_close_matches(own, VARIABLES, n=1)
        said.append(f"{name}: not used: " + (f"did you mean {PREFIX}{near[0]}?" if near else "no part reads it"))
    return said


def field_names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of a struct's settings."""
    return tuple(field.name for field in msgspec.structs.fields(kind))


def parse_size(text: str) -> int:
    """Parse a size in bytes, with units of 1000 (kB, MB, GB, TB) or 1024 (KiB, MiB, GiB, TiB). Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; examples: 8GiB, 200MB, 4096")
    return round(float(match[1]) * _UNITS[(match[2] or "").lower()])


def merge(
    kind: type[T],
    *,
    table: Mapping[str, object] | None = None,
    file: str = "",
    variables: Mapping[str, str] | None = None,
    prefix: str = "",
    flags: Mapping[str, tuple[str, object]] | None = None,
) -> T:
    """Merge the sources. `table` is a section of `file`, by field. In the environment `variables`, `prefix` plus the
    field's name in capitals names a setting. `flags` has, by field, the flag as given and its value.

    Raises ConfigurationError, or UsageError for a flag, with the source and the accepted values.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in (table or {}).items():
        if name not in types:
            raise ConfigurationError(
                f"The file {file} sets {name}, which is not a setting.",
                hint=f"correct or remove it; the settings are {', '.join(types)}",
            )
        values[name] = _convert(name, value, types[name], ConfigurationError, f"{name} in {file}")
    for name, type_ in types.items():
        variable = prefix + name.upper()
        if variables and variable in variables:
            values[name] = _convert(name, variables[variable], type_, ConfigurationError, f"The variable {variable}")
        if flags and name in flags:
            flag, value = flags[name]
            values[name] = _convert(name, value, type_, UsageError, flag)
    return kind(**values)


def _convert(name: str, value: object, type_: Any, error_type: type[FlyballError], place: str) -> Any:  # noqa: ANN401 - of the field's type
    try:
        if isinstance(value, str):
            if name.endswith(("_bytes", "_bytes_per_s")):
                value = parse_size(value)
            elif type_ is bool:
                value = _WORDS.get(value.lower(), value)
        return wire.convert(value, type_, strict=not isinstance(value, str))
    except (ValueError, OverflowError, msgspec.ValidationError) as error:
        raise error_type(f"{place} has an invalid value: {error}.", hint="correct or remove it") from error
