"""Flyball: a supervisor for PyTorch training. `import flyball` is cheap; names load when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyball.sdk.files import load, save
    from flyball.sdk.trainer import Job, attach

__version__ = "0.1.0"
__all__ = ["attach", "Job", "save", "load", "__version__"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the module protocol of PEP 562
    if name in {"attach", "Job"}:
        return getattr(import_module("flyball.sdk.trainer"), name)
    if name in {"save", "load"}:
        return getattr(import_module("flyball.sdk.files"), name)
    raise AttributeError(f"module 'flyball' has no attribute {name!r}")
