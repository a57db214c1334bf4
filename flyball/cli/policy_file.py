"""Reads a policy file: how the controller decides about one job (TOML, one setting a line)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flyball.contracts import wire
from flyball.contracts.cluster import PolicyValue
from flyball.contracts.errors import ConfigurationError

MAX_FILE_BYTES = 64 << 10
_SETTING = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


def read_policy(path: str) -> dict[str, PolicyValue]:
    """Return the settings of a file, checked; {} without a file. Raises ConfigurationError with the line."""
    if not path:
        return {}
    from services.controller.round import job_policy

    text = _read(path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"The policy file {path} is not TOML: {error}.", hint="correct that place") from error
    lines = _lines(text)
    where = {name: f"line {lines[name]} of {path}" if name in lines else path for name in table}
    for name, value in table.items():
        if isinstance(value, Mapping):
            raise ConfigurationError(
                f"The policy file {path} has a section [{name}].", hint="write settings without sections: name = value"
            )
    try:
        given = wire.convert(table, dict[str, PolicyValue])
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"The policy file {path} has a value of a wrong type: {error}.", hint="numbers, words and lists of words"
        ) from error
    job_policy.check(given, where)
    return given


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigurationError(
                f"The policy file {path} is larger than {MAX_FILE_BYTES} bytes.", hint="give the policy's own file"
            )
        return data.decode()
    except OSError as error:
        raise ConfigurationError(
            f"The policy file {path} cannot be read: {error.strerror}.", hint="give the path of a TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"The policy file {path} is not UTF-8.", hint="save it as UTF-8") from error


def _lines(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if (match := _SETTING.match(line)) is not None:
            found.setdefault(match[1], number)
    return found
