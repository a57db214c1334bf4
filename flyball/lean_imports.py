"""The libraries that every process of Flyball imports, without the extras that they import where they find them.

structlog draws tracebacks with rich, and httpx has a command line made of click, rich and pygments. Nobody here uses
either, and together they take as long to import as the libraries themselves, in each of four processes.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = (("structlog", ("rich", "rich.console", "rich.pretty", "rich.traceback")), ("httpx", ("httpx._main",)))


def import_lean(*libraries: str) -> None:
    """Import these of structlog and httpx, if they were not. Call it before any module that imports them."""
    for library, extras in _LIBRARIES:
        if library in libraries and library not in sys.modules:
            with _hidden(extras):
                importlib.import_module(library)


@contextmanager
def without_collector() -> Iterator[None]:
    """Around imports: modules make few cycles, and looking for them while they load takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _hidden(modules: tuple[str, ...]) -> Iterator[None]:
    """Importing one of these fails meanwhile, as if it was not installed."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(dict.fromkeys(modules))  # type: ignore[arg-type]  # None is how the import system spells it
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
