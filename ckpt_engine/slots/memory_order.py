"""In which order other processes see what one process stores in shared memory.

x86-64 shows stores in the order in which they were made, and loads are made in order, which is all that the control
words rely on; there the fence is nothing. Other machines (ARM) reorder both: there it is C's `atomic_thread_fence`,
from GCC's libatomic, since Python has none. Without it a slot could be seen as committed before its bytes: slots are
then refused, and training goes on without.
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
    """What to call between a store that must be seen first and one that must be seen later (and between loads).
    Raises ConfigurationError on a machine that needs a fence and has none."""
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
    """The fence of the machine that this process runs on."""
    return make_fence(platform.machine())


def _nothing() -> None:
    pass
