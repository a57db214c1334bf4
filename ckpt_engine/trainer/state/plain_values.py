"""Values of Python's standard library that a state may have beside numbers, strings and containers: as JSON, and back.

    {"$path": [class, text]} {"$range": [start, stop, step]} {"$bytearray": base64}
    {"$date": iso} {"$time": [iso, fold]} {"$datetime": [iso, fold]} {"$timedelta": [days, seconds, microseconds]}

Classes are those of a fixed list: nothing saved names code. A value of any other class, also of a subclass, is refused.
"""

from __future__ import annotations

import base64
import datetime
import pathlib
from collections.abc import Callable
from typing import Any, Final

_PATHS: dict[str, Callable[[str], pathlib.PurePath]] = {
    kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}
FACTORIES: Final = {kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}
"""Of a defaultdict."""


class NotPlain(ValueError):
    """Why a value cannot be saved, as the end of a sentence about it."""


def encode(value: object) -> dict[str, Any] | None:
    """The node of a value; None if it is of none of these classes. Raises NotPlain for a value that would not come back
    as it is."""
    made = _TO_JSON.get(type(value))
    return None if made is None else made(value)


def factory_name(factory: object) -> str | None:
    """The name of a defaultdict's `default_factory`. Raises NotPlain for one that is not among FACTORIES."""
    if factory is None:
        return None
    for name, kind in FACTORIES.items():
        if factory is kind:
            return name
    raise NotPlain("is a defaultdict whose default_factory is code of its own")


def _with_fold(tag: str) -> Callable[[Any], dict[str, Any]]:
    def to_json(value: datetime.datetime | datetime.time) -> dict[str, Any]:
        if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
            raise NotPlain("has a time zone that is not a fixed offset")
        return {tag: [value.isoformat(), value.fold]}

    return to_json


def _path(content: list[str]) -> pathlib.PurePath:
    name, text = content
    return _PATHS[name](text)


_TO_JSON: dict[Any, Callable[[Any], dict[str, Any]]] = {
    **{kind: lambda value: {"$path": [type(value).__name__, str(value)]} for kind in _PATHS.values()},
    range: lambda value: {"$range": [value.start, value.stop, value.step]},
    bytearray: lambda value: {"$bytearray": base64.b64encode(value).decode()},
    datetime.datetime: _with_fold("$datetime"),
    datetime.time: _with_fold("$time"),
    datetime.date: lambda value: {"$date": value.isoformat()},
    datetime.timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
}
FROM_JSON: Final[dict[str, Callable[[Any], Any]]] = {
    "$path": _path,
    "$range": lambda bounds: range(*bounds),
    "$bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "$datetime": lambda pair: datetime.datetime.fromisoformat(pair[0]).replace(fold=pair[1]),
    "$time": lambda pair: datetime.time.fromisoformat(pair[0]).replace(fold=pair[1]),
    "$date": datetime.date.fromisoformat,
    "$timedelta": lambda parts: datetime.timedelta(*parts),
}
