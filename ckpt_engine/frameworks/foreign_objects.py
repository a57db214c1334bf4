"""Objects in the checkpoints of frameworks, saved by named fields.

An object of a class that is declared becomes a dict with its class and its fields, and is made of them again. Every
other object stays as it is, so that whoever saves the state refuses it, with its path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckpt_engine.trainer.state.state_tree import with_metadata
from flyball.contracts.errors import CorruptShard, UnsupportedState

CLASS, FIELDS = "flyball.class", "flyball.fields"
_CONTAINERS = (dict, OrderedDict, list, tuple)


@dataclass(frozen=True, slots=True)
class NamedFields:
    """A class whose objects may be saved, and their attributes: all of them. Members of an Enum are saved by value."""

    kind: type
    fields: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind.__module__}.{self.kind.__qualname__}"

    def read(self, value: object, path: str) -> dict[str, Any]:
        """Raises UnsupportedState, naming the path, for an attribute that is not declared."""
        if isinstance(value, Enum):
            return {"value": value.value}
        found = vars(value)
        for name in found:
            if name not in self.fields:
                raise UnsupportedState(
                    f"The state at '{path}.{name}' is an attribute of {self.name} that is not declared.",
                    hint=f"declare all attributes: NamedFields({self.kind.__qualname__}, ({name!r}, ...))",
                )
        return dict(found)

    def make(self, fields: dict[str, Any]) -> Any:  # noqa: ANN401 - an object of `kind`
        if issubclass(self.kind, Enum):
            return self.kind(fields["value"])
        made = self.kind.__new__(self.kind)
        for name in fields.keys() & set(self.fields):
            object.__setattr__(made, name, fields[name])
        return made


class ForeignObjects:
    """Encodes and decodes states with objects of the declared classes."""

    def __init__(self, declared: Iterable[NamedFields]) -> None:
        self._by_class = {one.kind: one for one in declared}
        self._by_name = {one.name: one for one in self._by_class.values()}

    def encode(self, value: Any, path: str = "") -> Any:  # noqa: ANN401 - any state
        """`value` with dicts in place of declared objects; tensors are the same ones. Raises UnsupportedState."""
        declared = self._by_class.get(type(value))
        if declared is not None:
            fields = {name: self.encode(item, f"{path}.{name}") for name, item in declared.read(value, path).items()}
            return {CLASS: declared.name, FIELDS: fields}
        if type(value) in (dict, OrderedDict) and CLASS in value:
            raise UnsupportedState(f"The state at {path!r} has the key {CLASS!r}.", hint="use another key")
        return _mapped(value, lambda item, key: self.encode(item, f"{path}.{key}" if path else str(key)))

    def decode(self, value: Any) -> Any:  # noqa: ANN401 - any state
        """What was encoded. Raises CorruptShard for a class that is not declared."""
        if type(value) is dict and CLASS in value:
            declared = self._by_name.get(value[CLASS])
            if declared is None:
                raise CorruptShard(
                    f"The state has a {value[CLASS]}, which is not declared.",
                    hint="declare the class as it was when the state was saved",
                )
            try:
                return declared.make(self.decode(value[FIELDS]))
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                raise CorruptShard(f"A {declared.name} cannot be made of its fields: {error!r}.") from error
        return _mapped(value, lambda item, _: self.decode(item))


def _mapped(value: Any, change: Callable[[Any, object], Any]) -> Any:  # noqa: ANN401 - any state
    """A container of the same type with its items changed. Anything else is returned as it is."""
    if type(value) not in _CONTAINERS:
        return value
    if isinstance(value, dict):
        changed = type(value)((key, change(item, key)) for key, item in value.items())
        return with_metadata(changed, value)
    return type(value)(change(item, index) for index, item in enumerate(value))
