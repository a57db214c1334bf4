"""The control segment: the mutable words of one rank's slots, apart from the bytes that they speak of.

Every word is 8 bytes and has one writer, so that no lock is needed and none can be left behind by a killed process:

- slot words: whoever fills the slot (the trainer; the engine for a fetched shard or a replica), except `committed`
- `committed` and the manifest: whoever commits (the engine; a trainer without one)
- world and restore words: the engine (a trainer without one)
- trainer words, and the number of slots in use: the trainer
- the time of the last use: whoever uses the segment; it is the same to all of them whose store comes last

A slot's state is never stored but follows from its sequence numbers: a write begins by raising `written`, is whole
when `captured` equals it, and verified when `committed` does. A late committer of overwritten bytes changes nothing.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Collection

import xxhash

from ckpt_engine.format.manifest import MAX_MANIFEST_BYTES
from ckpt_engine.slots import segment_files
from ckpt_engine.slots.control_file import HEADER_BYTES, LAST_USE_WORD, LAYOUT_VERSION, MAGIC, boot_time_ns, open_in_use
from ckpt_engine.slots.control_views import ParkState, RestoreAnswer, RestoreState, RestoreWords, WorldWords
from ckpt_engine.slots.memory_order import this_machines_fence
from ckpt_engine.slots.slot_rules import MAX_SLOTS, MIN_SLOTS, AbandonedSteps, SlotState, SlotView
from flyball.contracts.checkpoints import Tier
from flyball.contracts.fault_points import reach

# Word numbers. Slot words repeat every _SLOT_STRIDE words.
_SLOTS_IN_USE = 3
_SLOT, _SLOT_STRIDE = 16, 16
_WRITTEN, _CAPTURED, _COMMITTED, _DROPPED, _GENERATION, _STEP, _PAYLOAD_BYTES = range(7)
_MANIFEST_BYTES, _MANIFEST_HASH_LOW, _MANIFEST_HASH_HIGH = range(7, 10)
_FENCE_EPOCH, _FENCE_GENERATION = 96, 97
_WORLD_GENERATION, _WORLD_STEP = 98, 99
_EMERGENCY_GENERATION, _EMERGENCY_STEP = 100, 101
_ABANDONED_UPTO, _ABANDONED = 102, range(103, 119)
_REPLICATED_STEP, _DURABLE_STEP = 120, 121
_HELD = {Tier.DISK: 122, Tier.PERSISTENT: 123}  # the step plus one, 0: none
_NEXT_SAVE = 124
_SETTLED = {Tier.DISK: 125, Tier.PERSISTENT: 126, Tier.MEMORY: 127}  # likewise
_PACE = 119
_RESTORE_GENERATION, _RESTORE_STATE, _RESTORE_STEP, _RESTORE_SLOT = 128, 129, 130, 131
_RESTORE_TIER, _RESTORE_SOCKET_BYTES, _RESTORE_TEXT_BYTES = 132, 133, 134
_TRAINER_GENERATION, _POSITION, _PARK = 160, 161, 162
_ABORTED_COUNT, _ABORTED, _ABORTED_ENTRIES = 164, 165, 8
_RESTORE_ANSWER = 176  # generation * len(RestoreAnswer) + answer
_TEXT_OFFSET, _MAX_TEXT_BYTES = 4096, 2048

_SETTLE_S = 0.001  # longer than any store waits in a processor's store buffer
_READS = 4  # of a slot's words while they change; a write takes longer than that, unless the reader is held up
_TIERS = tuple(Tier)


class ControlSegment:
    """The words of one rank, mapped. Open it through `slots.RankSegments`."""

    def __init__(self, path: str, *, create: bool) -> None:
        self.path = path
        self._fence = this_machines_fence()
        self.descriptor = open_in_use(path, _initial_words, create=create)
        self._mapping = mmap.mmap(self.descriptor, HEADER_BYTES)
        self._words = memoryview(self._mapping).cast("q")
        if create:  # who only looks does not prolong the life of what it looks at
            self.note_use()

    def note_use(self) -> None:
        """Somebody uses the segment now: its time to live begins again."""
        self._words[LAST_USE_WORD] = boot_time_ns()

    # --- slots ---

    @property
    def slots_in_use(self) -> int:
        """Slots that new shards are written to; those beyond may still hold old ones."""
        return min(max(self._words[_SLOTS_IN_USE], MIN_SLOTS), MAX_SLOTS)

    def use_slots(self, count: int) -> None:
        """Write new shards to the first `count` slots. What the others hold stays until it is dropped."""
        self._words[_SLOTS_IN_USE] = count

    def slot(self, index: int) -> SlotView:
        """What is in a slot, all of it of one moment: the words are read again if a write began meanwhile."""
        words, base = self._words, _SLOT + index * _SLOT_STRIDE
        surplus = index >= self.slots_in_use
        for _ in range(_READS):
            written, captured, committed, dropped = words[base : base + 4].tolist()
            self._fence()
            generation, step, payload_bytes = words[base + _GENERATION : base + _PAYLOAD_BYTES + 1].tolist()
            self._fence()
            if words[base + _WRITTEN] == written:
                break
        else:
            return SlotView(index, SlotState.WRITING, generation, step, payload_bytes, words[base + _WRITTEN], surplus)
        if dropped == written:  # also 0 == 0: never written
            return SlotView(index, SlotState.EMPTY, -1, -1, 0, written, surplus)
        state = SlotState.WRITING
        if captured == written:
            state = SlotState.COMMITTED if committed == written else SlotState.CAPTURED
        return SlotView(index, state, generation, step, payload_bytes, written, surplus)

    def begin_write(self, index: int, generation: int, step: int, payload_bytes: int) -> None:
        base = _SLOT + index * _SLOT_STRIDE
        self._words[base + _WRITTEN] += 1  # first: from here on the old bytes do not count
        self._fence()
        self._words[base + _GENERATION] = generation
        self._words[base + _STEP] = step
        self._words[base + _PAYLOAD_BYTES] = payload_bytes
        self.note_use()
        reach("slot.begun")

    def mark_captured(self, index: int) -> None:
        base = _SLOT + index * _SLOT_STRIDE
        reach("slot.before_captured")
        self._fence()  # the bytes are seen before the word that says that they are whole
        self._words[base + _CAPTURED] = self._words[base + _WRITTEN]

    def drop(self, index: int, sequence: int | None = None) -> None:
        """The slot is empty: its write was given up, or the bytes of `sequence` turned out to be bad. A write that has
        begun since then is not touched: it has another sequence."""
        base = _SLOT + index * _SLOT_STRIDE
        written = self._words[base + _WRITTEN]
        if sequence is None or sequence == written:
            self._words[base + _DROPPED] = written

    def commit(self, index: int, sequence: int, manifest: bytes) -> None:
        """Store the manifest of the bytes that were captured as `sequence`, then the word that makes it count."""
        base = _SLOT + index * _SLOT_STRIDE
        digest = xxhash.xxh3_128_digest(manifest)
        reach("slot.before_manifest")
        self._words[base + _COMMITTED] = 0  # a manifest that is being replaced belongs to nothing
        self._fence()
        segment_files.write_at(self.descriptor, manifest, HEADER_BYTES + index * MAX_MANIFEST_BYTES)
        self._words[base + _MANIFEST_BYTES] = len(manifest)
        self._words[base + _MANIFEST_HASH_LOW] = int.from_bytes(digest[:8], "little", signed=True)
        self._words[base + _MANIFEST_HASH_HIGH] = int.from_bytes(digest[8:], "little", signed=True)
        reach("slot.before_committed")
        self._fence()
        self._words[base + _COMMITTED] = sequence
        self.note_use()
        reach("slot.committed")

    def manifest(self, index: int) -> bytes | None:
        """The stored manifest of a committed slot; None if the slot is not committed or the manifest is torn."""
        if self.slot(index).state is not SlotState.COMMITTED:
            return None
        base = _SLOT + index * _SLOT_STRIDE
        size_bytes = self._words[base + _MANIFEST_BYTES]
        if not 0 < size_bytes <= MAX_MANIFEST_BYTES:
            return None
        data = os.pread(self.descriptor, size_bytes, HEADER_BYTES + index * MAX_MANIFEST_BYTES)
        expected = self._words[base + _MANIFEST_HASH_LOW : base + _MANIFEST_HASH_HIGH + 1].tobytes()
        return data if xxhash.xxh3_128_digest(data) == expected else None

    # --- the engine's words ---

    def read_world(self) -> WorldWords:
        words = self._words
        generation = words[_WORLD_GENERATION]  # before the step: a step may only be taken for an older one
        self._fence()
        upto = words[_ABANDONED_UPTO]  # before the step: a world step between the two would pass for abandoned
        self._fence()
        step = words[_WORLD_STEP]  # before what is held: a step is held before the world step passes it
        self._fence()
        named = frozenset(words[_ABANDONED.start : _ABANDONED.stop].tolist()) - {-1}
        return WorldWords(
            fence_epoch=words[_FENCE_EPOCH],
            fence_generation=words[_FENCE_GENERATION],
            generation=generation,
            step=step,
            abandoned=AbandonedSteps(named, step, upto),
            held=frozenset(words[word] - 1 for word in _HELD.values() if words[word] > 0),
        )

    def write_fence(self, epoch: int, generation: int) -> None:
        """Trainers of an older generation save nothing more."""
        self._words[_FENCE_EPOCH] = epoch
        self._words[_FENCE_GENERATION] = generation

    def begin_world(self, generation: int, step: int) -> None:
        """A generation begins at its restore step (-1: from scratch); nothing of the one before counts."""
        words = self._words
        self._fence()  # who sees any of this sees that the generation before was fenced out
        steps = (_WORLD_STEP, _REPLICATED_STEP, _DURABLE_STEP, _EMERGENCY_STEP, _NEXT_SAVE)
        for word in (*steps, _ABANDONED_UPTO, *_ABANDONED):
            words[word] = -1
        words[_PACE] = 0
        self.release_holds()
        words[_PARK] = ParkState.RUNNING
        self._fence()
        words[_WORLD_GENERATION] = generation
        self._fence()
        words[_WORLD_STEP] = step

    def forget_run(self) -> None:
        """Everything but the slots as if new: it was said by, and to, another run of the job."""
        self._words[_FENCE_EPOCH:] = memoryview(_initial_words()).cast("q")[_FENCE_EPOCH:]

    def advance_world(self, step: int) -> None:
        """All ranks have `step`. Never goes back."""
        self._words[_WORLD_STEP] = max(step, self._words[_WORLD_STEP])

    def abandon(self, steps: Collection[int], upto: int = -1) -> None:
        """Some rank will never have `steps`, nor any up to `upto` that is newer than the world step. Call after
        `advance_world` with the world step of that moment. `steps` are all that count beside `upto`: the newest 16."""
        self._fence()
        self._words[_ABANDONED_UPTO] = max(upto, self._words[_ABANDONED_UPTO])
        newest = set(sorted(steps)[-len(_ABANDONED) :])
        free = [entry for entry in _ABANDONED if self._words[entry] not in newest]
        known = [self._words[entry] for entry in _ABANDONED]
        for entry, step in zip(free, newest.difference(known), strict=False):
            self._words[entry] = step

    def hold(self, tier: Tier, step: int) -> None:
        """This tier writes `step` straight from its slot: it must not be overwritten before `let_go`. A tier holds one
        step, the newest. Call before the world step passes it."""
        self._words[_HELD[tier]] = step + 1
        self._fence()

    def let_go(self, tier: Tier, step: int, *, settled: bool = False) -> None:
        """`step` was written, or given up: `settled`, for good. A newer one that is held stays held."""
        self._fence()  # its bytes were read, and what is durable was noted, before
        if settled:
            self._words[_SETTLED[tier]] = max(step + 1, self._words[_SETTLED[tier]])
        if self._words[_HELD[tier]] == step + 1:
            self._words[_HELD[tier]] = 0

    def release_holds(self) -> None:
        """No tier writes anything: a generation, or an engine, begins."""
        for word in (*_HELD.values(), *_SETTLED.values()):
            self._words[word] = 0

    def note_replicated(self, step: int) -> None:
        """This rank's shard of `step` is committed and on every configured peer. Never goes back."""
        self._words[_REPLICATED_STEP] = max(step, self._words[_REPLICATED_STEP])

    def note_durable(self, step: int) -> None:
        """This rank's shard of `step` is on a configured disk or persistent tier. Never goes back."""
        self._words[_DURABLE_STEP] = max(step, self._words[_DURABLE_STEP])

    def note_lost(self, step: int) -> None:
        """This rank will never have `step`: it is settled in the memory tier."""
        self._words[_SETTLED[Tier.MEMORY]] = max(step + 1, self._words[_SETTLED[Tier.MEMORY]])

    def replicated_step(self, generation: int) -> int:
        """Newest step of `generation` that `note_replicated` named, -1 if none."""
        return self._words[_REPLICATED_STEP] if self._words[_WORLD_GENERATION] == generation else -1

    def durable_step(self, generation: int) -> int:
        """Newest step of `generation` that `note_durable` named, -1 if none."""
        return self._words[_DURABLE_STEP] if self._words[_WORLD_GENERATION] == generation else -1

    def settled_step(self, tier: Tier, generation: int) -> int:
        """Newest step of `generation` that `tier` has, or will never have, -1 if none."""
        return self._words[_SETTLED[tier]] - 1 if self._words[_WORLD_GENERATION] == generation else -1

    def arm(self, generation: int, step: int) -> int:
        """Ask the trainer of `generation` to save and park at `step`; returns its position (-1: none yet).

        If the position is `step` or more, it came too late: `disarm`. The trainer writes its position before it looks
        here, and this looks at the position after having written, so that at least one of the two sees the other.
        """
        self._words[_EMERGENCY_STEP] = -1
        self._fence()
        self._words[_EMERGENCY_GENERATION] = generation
        self._fence()
        self._words[_EMERGENCY_STEP] = step
        self._fence()
        time.sleep(_SETTLE_S)  # until the stores of both sides, in whatever order they were done, are visible
        return self.position(generation)

    def disarm(self) -> None:
        self._words[_EMERGENCY_STEP] = -1

    def position(self, generation: int) -> int:
        """Newest step whose save the trainer of `generation` began, -1 if none."""
        return self._words[_POSITION] if self._words[_TRAINER_GENERATION] == generation else -1

    def name_save(self, step: int) -> None:
        """The coordinator wants `step` of the present world's generation, for an interval in seconds."""
        self._words[_NEXT_SAVE] = step

    def next_save(self, generation: int) -> int:
        """What `name_save` named last for this generation, -1 for nothing."""
        return self._words[_NEXT_SAVE] if self._words[_WORLD_GENERATION] == generation else -1

    def set_pace(self, word: int) -> None:
        """What intervals in steps of the present world's generation are multiplied by, as `save_pace` packs it."""
        self._words[_PACE] = word

    def pace(self, generation: int) -> int:
        """What `set_pace` was told last for this generation, 0 for nothing."""
        return self._words[_PACE] if self._words[_WORLD_GENERATION] == generation else 0

    def aborted_steps(self, generation: int) -> frozenset[int]:
        """The newest few steps that the trainer of `generation` gave up."""
        words = self._words
        if words[_TRAINER_GENERATION] != generation:
            return frozenset()
        count = min(words[_ABORTED_COUNT], _ABORTED_ENTRIES)
        return frozenset(words[_ABORTED : _ABORTED + count].tolist())

    def write_restore(self, words: RestoreWords) -> None:
        text = (words.path or words.error).encode()[:_MAX_TEXT_BYTES]
        self._words[_RESTORE_STATE] = RestoreState.PENDING
        self._fence()
        self._words[_RESTORE_GENERATION] = words.generation
        self._words[_RESTORE_STEP] = words.step
        self._words[_RESTORE_SLOT] = words.slot
        self._words[_RESTORE_TIER] = _TIERS.index(words.tier)
        self._words[_RESTORE_SOCKET_BYTES] = words.socket_bytes
        self._words[_RESTORE_TEXT_BYTES] = len(text)
        self._mapping[_TEXT_OFFSET : _TEXT_OFFSET + len(text)] = text
        self._fence()
        self._words[_RESTORE_STATE] = words.state  # last: what a reader sees with it is complete

    def read_restore(self) -> RestoreWords:
        words = self._words
        generation = words[_RESTORE_GENERATION]  # before the state, or the state of an older one could pass for its own
        self._fence()
        state = RestoreState(words[_RESTORE_STATE])
        self._fence()
        text = self._mapping[_TEXT_OFFSET : _TEXT_OFFSET + min(words[_RESTORE_TEXT_BYTES], _MAX_TEXT_BYTES)]
        said = text.decode(errors="replace").replace("\0", "?")  # no path has one
        is_file = state is RestoreState.FILE or (state is RestoreState.READY and words[_RESTORE_SLOT] < 0)
        return RestoreWords(
            generation=generation,
            state=state,
            step=words[_RESTORE_STEP],
            slot=words[_RESTORE_SLOT],
            tier=_TIERS[words[_RESTORE_TIER] % len(_TIERS)],
            socket_bytes=words[_RESTORE_SOCKET_BYTES],
            error="" if is_file else said,
            path=said if is_file else "",
        )

    def restore_answer(self, generation: int) -> RestoreAnswer:
        """What the trainer of `generation` said last of the restore."""
        said_of, answer = divmod(self._words[_RESTORE_ANSWER], len(RestoreAnswer))
        return RestoreAnswer(answer) if said_of == generation else RestoreAnswer.NONE

    def withdraw_file(self, words: RestoreWords) -> bool:
        """Write `words` in place of those of state FILE. False if the trainer is reading the file already: it says so
        before it looks again whether it may, and this looks after having written, so that one of the two sees the
        other; a trainer that saw this goes back to NONE."""
        self.write_restore(words)
        time.sleep(_SETTLE_S)  # until the stores of both sides are visible
        return self.restore_answer(words.generation) is not RestoreAnswer.READING_FILE

    # --- the trainer's words ---

    def attach_trainer(self, generation: int) -> None:
        """A trainer of `generation` begins; it has saved nothing."""
        self._words[_POSITION] = -1
        self._fence()
        self._words[_ABORTED_COUNT] = 0
        self._words[_TRAINER_GENERATION] = generation

    def write_position(self, step: int) -> None:
        """The save of `step` begins. Call before `emergency_step`."""
        self._words[_POSITION] = step
        self._fence()

    def note_aborted(self, step: int) -> None:
        """This rank will never have `step`. Unlike the notice, it cannot be lost."""
        count = self._words[_ABORTED_COUNT]
        self._words[_ABORTED + count % _ABORTED_ENTRIES] = step
        self._words[_ABORTED_COUNT] = count + 1

    def answer_restore(self, generation: int, answer: RestoreAnswer) -> None:
        """Say how far this trainer is with the restore. Look at `read_restore` after READING_FILE."""
        self._words[_RESTORE_ANSWER] = generation * len(RestoreAnswer) + answer
        self._fence()

    def emergency_step(self, generation: int) -> int:
        """The step at which to save and park, -1 if none was named for this generation."""
        return self._words[_EMERGENCY_STEP] if self._words[_EMERGENCY_GENERATION] == generation else -1

    @property
    def park(self) -> ParkState:
        return ParkState(self._words[_PARK])

    @park.setter
    def park(self, state: ParkState) -> None:
        self._words[_PARK] = state

    def close(self) -> None:
        self._words.release()
        self._mapping.close()
        os.close(self.descriptor)


def _initial_words() -> bytes:
    words = memoryview(bytearray(HEADER_BYTES)).cast("q")
    words[0] = MAGIC
    words[1] = LAYOUT_VERSION
    words[_SLOTS_IN_USE] = MIN_SLOTS
    words[LAST_USE_WORD] = boot_time_ns()
    for word in (
        *(_FENCE_GENERATION, _WORLD_GENERATION, _WORLD_STEP, _EMERGENCY_GENERATION, _EMERGENCY_STEP),
        *(_RESTORE_GENERATION, _RESTORE_STEP, _RESTORE_SLOT, _TRAINER_GENERATION, _POSITION),
        *(_REPLICATED_STEP, _DURABLE_STEP, _NEXT_SAVE),
        *(_ABANDONED_UPTO, *_ABANDONED),
    ):
        words[word] = -1
    return words.tobytes()
