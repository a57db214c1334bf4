"""The layout of the control segment's words."""

from __future__ import annotations

from ckpt_engine.contracts.control_views import NOTHING_KEPT, KeptStep
from ckpt_engine.rules.slot_rules import MIN_SLOTS
from ckpt_engine.slots.control_file import HEADER_BYTES, LAST_USE_WORD, LAYOUT_VERSION, MAGIC, boot_time_ns
from flyball.contracts.checkpoints import Tier
from flyball.contracts.identity import MAX_STEP

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
KEPT = 163  # 2 * (step + 1), and 1 if it is sure; 0: none
ABORTED_COUNT, ABORTED, ABORTED_ENTRIES = 164, 165, 8
RESTORE_ANSWER = 176  # generation * len(RestoreAnswer) + answer
LAYOUT_ASKED = 177  # generation + 1; 0: never
TEXT_OFFSET, MAX_TEXT_BYTES = 4096, 2048


def seen_step(word: int) -> int:
    """The step in a word, -1 if there is none. A script may write anything there. What no step can be counts as none,
    and gets into no message, since a receiver would refuse the whole of that."""
    return word if 0 <= word <= MAX_STEP else -1


def kept_step(word: int) -> KeptStep:
    step, is_sure = divmod(word, 2)
    return KeptStep(step - 1, bool(is_sure)) if seen_step(step - 1) >= 0 else NOTHING_KEPT


def kept_word(kept: KeptStep) -> int:
    return 2 * (kept.step + 1) + kept.is_sure if kept.step >= 0 else 0


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
