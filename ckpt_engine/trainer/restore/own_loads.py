"""Which parts of a module's state its own code loads: there the names and shapes that it has now say nothing.

A module that overrides `_load_from_state_dict`, or has hooks before a load, may rename entries, convert them, or change
its own shapes (observers, lazy modules). One with extra state decides about that entry alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ckpt_engine.trainer.state.state_tree import is_lazy

_EXTRA_STATE = "_extra_state"
_TORCH = "torch."
_ONLY_MOVES = "torch.distributed."  # FSDP and wrappers: their entries are those of `state_dict()`, by name and shape


@dataclass(frozen=True, slots=True)
class OwnLoads:
    """Of one module. `deciding` and `foreign` have the names of modules whose entries, and those of all modules inside,
    their own code loads; `foreign` is code that is not torch's. `extra` has the names of entries."""

    deciding: frozenset[str]
    foreign: frozenset[str]
    extra: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> OwnLoads:
        deciding: set[str] = set()
        foreign: set[str] = set()
        extra: set[str] = set()
        for name, inner in module.named_modules(remove_duplicate=False):
            codes = _code_of(inner, is_root=inner is module)
            if codes:
                deciding.add(name)
                if not all(code.startswith(_TORCH) for code in codes):
                    foreign.add(name)
            if _own(inner, "get_extra_state") or _own(inner, "set_extra_state"):
                extra.add(f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE)
        return cls(frozenset(deciding), frozenset(foreign), frozenset(extra))

    def decide(self, entry: str) -> bool:
        """Whether the module's own load decides what may be saved under this name."""
        return entry in self.extra or _is_inside(entry, self.deciding)

    def need_memory(self, entry: str, tensor: torch.Tensor) -> bool:
        """Whether the saved values need memory of their own until they are loaded: code that is not torch's may look at
        what the module had, or change it, before it reads them."""
        return entry in self.extra or is_lazy(tensor) or _is_inside(entry, self.foreign)


def _is_inside(entry: str, modules: frozenset[str]) -> bool:
    if not modules:
        return False
    while entry:
        entry = entry.rpartition(".")[0]
        if entry in modules:
            return True
    return "" in modules


def _own(module: torch.nn.Module, method: str) -> Any:  # noqa: ANN401 - a function, or None
    """The function that `module` has in place of torch's."""
    found = getattr(module, method)
    found = getattr(found, "__func__", found)
    return None if found is getattr(torch.nn.Module, method) else found


def _code_of(module: torch.nn.Module, *, is_root: bool) -> list[str]:
    """The names of the Python modules whose code takes part in loading this module's own entries."""
    methods = ("_load_from_state_dict", "load_state_dict") if is_root else ("_load_from_state_dict",)
    code = [str(getattr(own, "__module__", "")) for method in methods if (own := _own(module, method)) is not None]
    for hook in module._load_state_dict_pre_hooks.values():
        inner = getattr(hook, "hook", hook)  # torch wraps it
        name = str(getattr(inner, "__module__", None) or type(inner).__module__)
        if not name.startswith(_ONLY_MOVES):
            code.append(name)
    return code
