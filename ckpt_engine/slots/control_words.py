"""The layout of the control segment's words, and the fence that orders their stores and loads.

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

from ckpt_engine.rules.slot_rules import MIN_SLOTS
from ckpt_engine.slots.control_file import HEADER_BYTES, LAST_USE_WORD, LAYOUT_VERSION, MAGIC, boot_time_ns
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import ConfigurationError

# Word numbers. Slot words repeat every SLOT_STRIDE words.
SLOTS_IN_USE = 3
SLOT, SLOT_STRIDE = 16, 16
WRITTEN, CAPTURED, COMMITTED, DROPPED, GENERATION, STEP, PAYLOAD_BYTES = range(7)
MANIFEST_BYTES, MANIFEST_HASH_LOW, MANIFEST_HASH_HIGH = range(7, 10)
FENCE_EPOCH, FENCE_GENERATION = 96, 97
WORLD_GENERATION, WORLD_STEP = 98, 99
EMERGENCY_GENERATION, EMERGENCY_STEP = 100, 101
ABANDONED_UPTO, ABANDONED = 102, range(103, 119)
REPLICATED_STEP, DURABLE_STEP = 120, 121
HELD = {Tier.DISK: 122, Tier.PERSISTENT: 123}  # step + 1; 0: none
NEXT_SAVE = 124
SETTLED = {Tier.DISK: 125, Tier.PERSISTENT: 126, Tier.MEMORY: 127}  # likewise
PACE = 119
RESTORE_GENERATION, RESTORE_STATE, RESTORE_STEP, RESTORE_SLOT = 128, 129, 130, 131
RESTORE_TIER, RESTORE_SOCKET_BYTES, RESTORE_TEXT_BYTES = 132, 133, 134
TRAINER_GENERATION, POSITION, PARK = 160, 161, 162
ABORTED_COUNT, ABORTED, ABORTED_ENTRIES = 164, 165, 8
RESTORE_ANSWER = 176  # generation * len(RestoreAnswer) + answer
TEXT_OFFSET, MAX_TEXT_BYTES = 4096, 2048

_IN_ORDER = ("x86_64", "amd64")
_SEQUENTIALLY_CONSISTENT = 5  # __ATOMIC_SEQ_CST


def initial_words() -> bytes:
    words = memoryview(bytearray(HEADER_BYTES)).cast("q")
    words[0] = MAGIC
    words[1] = LAYOUT_VERSION
    words[SLOTS_IN_USE] = MIN_SLOTS
    words[LAST_USE_WORD] = boot_time_ns()
    for word in (
        *(FENCE_GENERATION, WORLD_GENERATION, WORLD_STEP, EMERGENCY_GENERATION, EMERGENCY_STEP),
        *(RESTORE_GENERATION, RESTORE_STEP, RESTORE_SLOT, TRAINER_GENERATION, POSITION),
        *(REPLICATED_STEP, DURABLE_STEP, NEXT_SAVE),
        *(ABANDONED_UPTO, *ABANDONED),
    ):
        words[word] = -1
    return words.tobytes()


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
