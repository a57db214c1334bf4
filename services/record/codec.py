"""Writes contract values into columns, and reads them; finds the subject of a signal."""

from __future__ import annotations

from typing import Any

import msgspec

from flyball.contracts import wire
from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import NotFound
from flyball.contracts.reports.signals import Signal


def dump(value: object) -> str:
    """The JSON text of a contract value."""
    return msgspec.json.encode(value).decode()


def load(document: str, kind: Any) -> Any:  # noqa: ANN401 - a generic alias such as dict[str, int] has no common type
    """The contract value in a document that the store wrote."""
    return wire.decoder_of(kind).decode(document)


def shown(spec: JobSpec) -> JobSpec:
    """A job's specification for display. Its environment may contain secrets, so only the names are shown."""
    names = {field: dict.fromkeys(getattr(spec, field), "***") for field in ("env", "user_env", "sealed_env")}
    return msgspec.structs.replace(spec, **names)


def plain(value: object) -> Any:  # noqa: ANN401 - JSON has no static type
    """A contract value as plain dicts, lists and numbers."""
    return msgspec.json.decode(msgspec.json.encode(value))


MAX_NUMBER = 2**62  # of incidents and decisions: columns hold a little more


def number_of(identifier: str) -> int:
    """17 for "dec-17". Raises NotFound for anything but an identifier."""
    _, _, digits = identifier.rpartition("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19 or int(digits) > MAX_NUMBER:
        raise NotFound(f"{identifier!r} names nothing.", hint="identifiers look like dec-17 or inc-4")
    return int(digits)


class Subject(msgspec.Struct, frozen=True):
    """The host, job and rank that a signal is about."""

    kind: str
    job: str
    generation: int
    host_id: str


def subject_of(signal: Signal) -> Subject:
    """The subject, from the fields of the body. A body without a host is about its sender."""
    body = signal.body
    return Subject(
        kind=str(type(body).__struct_config__.tag),
        job=getattr(body, "job", ""),
        generation=getattr(body, "generation", -1),
        host_id=getattr(body, "host_id", "") or getattr(body, "peer", "") or signal.source,
    )
