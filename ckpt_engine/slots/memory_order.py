"""The fence that orders stores to the control segment's words, and loads from them.

The words rely on stores becoming visible in order, and on loads happening in order. x86-64 guarantees both, so the
fence does nothing there. Other machines (ARM) reorder both; Python has no fence, so it is C's `atomic_thread_fence`,
from GCC's libatomic. Without it a slot could look committed before its bytes are visible, so slots are refused then,
and training goes on without them.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable

from flyball.contracts.errors import ConfigurationError

_IN_ORDER = ("x86_64", "amd64")
_SEQUENTIALLY_CONSISTENT = 5  # __ATOMIC_SEQ_CST


def make_fence(machine: str, library: str = "libatomic.so.1") -> Callable[[], None]:
    """The function to call between a store that must become visible first and a later one, and between ordered loads.
    Raises ConfigurationError if the machine needs a fence and has none."""
    if machine.lower() in _IN_ORDER:
        return _nothing
    try:
        function = ctypes.CDLL(library).atomic_thread_fence
    except (OSError, AttributeError) as error:
        raise ConfigurationError(
            f"On {machine} the checkpoint slots need a memory fence, and {library} cannot be loaded: {error}.",
            hint="install libatomic (Debian and Ubuntu: libatomic1; Fedora: libatomic)",
        ) from error
    function.argtypes, function.restype = (ctypes.c_int,), None
    return lambda: function(_SEQUENTIALLY_CONSISTENT)


@functools.cache
def this_machines_fence() -> Callable[[], None]:
    """The fence for this machine."""
    return make_fence(platform.machine())


def _nothing() -> None:
    pass
