"""The `_metadata` of modules' state dicts, by where these lie in the nested state. DCP flattens the state and drops it;
`FlyballSavePlanner` notes it, and `FlyballReader` gives it to the state dicts that DCP then hands to the modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from ckpt_engine.trainer.state.state_tree import metadata_of

Place: TypeAlias = tuple[str | int, ...]
_MAX_DEPTH = 64


class ModuleVersions(msgspec.Struct, frozen=True, array_like=True):
    """Of one state dict."""

    place: Place
    metadata: dict[str, dict[str, int | str]]


def versions_in(state: object, place: Place = ()) -> tuple[ModuleVersions, ...]:
    """Those of all state dicts in a state."""
    found: list[ModuleVersions] = []
    if len(place) < _MAX_DEPTH:
        metadata = metadata_of(state)
        if metadata is not None:
            found.append(ModuleVersions(place, metadata))
        for key, item in _items(state):
            if type(key) in (str, int) and isinstance(item, Mapping | list | tuple):
                found += versions_in(item, (*place, key))
    return tuple(found)


def give_versions(state: object, saved: tuple[ModuleVersions, ...]) -> None:
    """Give the state dicts of a state, where it has any, the versions by which they were saved."""
    for versions in saved:
        target: Any = state
        for key in versions.place:
            target = dict(_items(target)).get(key)
        if type(target) is OrderedDict:
            target._metadata = OrderedDict((name, dict(local)) for name, local in versions.metadata.items())  # type: ignore[attr-defined]


def _items(value: object) -> Any:  # noqa: ANN401 - pairs
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()
