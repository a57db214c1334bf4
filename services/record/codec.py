"""How contract values are written into columns, and what a signal is about."""

from __future__ import annotations

from typing import Any

import msgspec

from flyball.contracts import wire
from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import NotFound
from flyball.contracts.reports.signals import Signal


def dump(value: object) -> str:
    """JSON text of a contract value."""
    return msgspec.json.encode(value).decode()


def load(document: str, kind: Any) -> Any:  # noqa: ANN401 - a generic alias such as dict[str, int] has no common type
    """The contract value of a document that this store wrote."""
    return wire.decoder_of(kind).decode(document)


def shown(spec: JobSpec) -> JobSpec:
    """A specification as people may see it: its environment may carry secrets, so that only the names are shown."""
    names = {field: dict.fromkeys(getattr(spec, field), "***") for field in ("env", "user_env", "sealed_env")}
    return msgspec.structs.replace(spec, **names)


def plain(value: object) -> Any:  # noqa: ANN401 - JSON has no static type
    """A contract value as the dicts, lists and numbers that its JSON has."""
    return msgspec.json.decode(msgspec.json.encode(value))


def number_of(identifier: str) -> int:
    """17 for "dec-17". Raises NotFound for what is no identifier of ours."""
    _, _, digits = identifier.rpartition("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise NotFound(f"{identifier!r} names nothing.", hint="identifiers look like dec-17 or inc-4")
    return int(digits)


class Subject(msgspec.Struct, frozen=True):
    """Whom a signal is about."""

    kind: str
    job: str
    generation: int
    host_id: str


def subject_of(signal: Signal) -> Subject:
    """From the body's own fields; a body that names no host is about the one that sent it."""
    body = signal.body
    return Subject(
        kind=str(type(body).__struct_config__.tag),
        job=getattr(body, "job", ""),
        generation=getattr(body, "generation", -1),
        host_id=getattr(body, "host_id", "") or getattr(body, "peer", "") or signal.source,
    )
