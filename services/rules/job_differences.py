"""How two submissions of one name differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from flyball.contracts.cluster import JobSpec


def differences(before: JobSpec, asked: JobSpec) -> str:
    """Names each field that differs, or returns '' if both are the same job, whichever shell submitted it. Of variables
    and settings it says only the names: values may be secrets."""
    return ", ".join(_fields(_without_user(before.as_asked), _without_user(asked)))


def _without_user(spec: JobSpec) -> JobSpec:
    """Drop the variables of the submitting shell, which do not make two submissions different jobs."""
    return msgspec.structs.replace(spec, user_env={}, sealed_env={})


def _fields(before: msgspec.Struct, asked: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    for name in before.__struct_fields__:
        old, new = getattr(before, name), getattr(asked, name)
        if isinstance(old, msgspec.Struct):
            yield from _fields(old, new, f"{prefix}{name}.")
        elif old != new and isinstance(old, Mapping):
            yield f"{prefix}{name} ({', '.join(sorted(key for key in {*old, *new} if old.get(key) != new.get(key)))})"
        elif old != new:
            yield f"{prefix}{name} is {_told(old)} there, {_told(new)} here"


def _told(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else repr(value)
