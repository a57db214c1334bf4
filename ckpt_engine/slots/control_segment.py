"""The control segment: the mutable words of one rank's slots, apart from the slots' bytes.

Every word has 8 bytes and one writer, so there is no lock that a killed process could leave behind:

- slot words: whoever fills the slot (the trainer; the engine for a fetched shard or a replica), except `committed`
- `committed` and the manifest: whoever commits (the engine; a trainer without one)
- world and restore words: the engine (a trainer without one)
- trainer words, and the number of slots in use: the trainer
- the time of the last use: any user; it does not matter whose store comes last

A slot's state is not stored. It follows from sequence numbers: a write begins by raising `written`; the slot is whole
when `captured` equals it, and verified when `committed` does. A late commit of overwritten bytes changes nothing.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Collection
from typing import cast

import xxhash

from ckpt_engine.contracts.control_views import (
    NOTHING_KEPT,
    AbandonedSteps,
    KeptStep,
    ParkState,
    RestoreAnswer,
    RestoreState,
    RestoreWords,
    WorldWords,
)
from ckpt_engine.format.manifest import MAX_MANIFEST_BYTES
from ckpt_engine.rules.slot_rules import MAX_SLOTS, MIN_SLOTS, SlotState, SlotView, can_hold
from ckpt_engine.slots import control_words as at
from ckpt_engine.slots import segment_files
from ckpt_engine.slots.control_file import HEADER_BYTES, LAST_USE_WORD, boot_time_ns, open_in_use
from ckpt_engine.slots.file_words import FileWords, Words
from ckpt_engine.slots.memory_order import this_machines_fence
from flyball.contracts.checkpoints import Tier
from flyball.contracts.fault_points import reach

_SETTLE_S = 0.001  # longer than any store waits in a processor's store buffer
_READS = 4  # of a slot's words while they change; only a reader that is held up needs more
_TIERS = tuple(Tier)


class ControlSegment:
    """The words of one rank. Open them through `RankSegments`."""

    def __init__(self, path: str, *, create: bool, mapped: bool) -> None:
        """`mapped`: for the trainer alone, see `file_words`."""
        self.path = path
        self._fence = this_machines_fence()
        self.descriptor = open_in_use(path, at.initial_words, create=create)
        self._mapping = mmap.mmap(self.descriptor, HEADER_BYTES) if mapped else None
        self._words: Words = (
            FileWords(self.descriptor, HEADER_BYTES)
            if self._mapping is None
            else cast("Words", memoryview(self._mapping).cast("q"))
        )
        if create:  # a mere reader does not prolong the segment's life
            self.note_use()

    def note_use(self) -> None:
        """The segment is in use: its time to live begins again."""
        self._words[LAST_USE_WORD] = boot_time_ns()

    # --- slots ---

    @property
    def slots_in_use(self) -> int:
        """Number of slots for new shards; slots beyond may still hold old ones."""
        return min(max(self._words[at.SLOTS_IN_USE], MIN_SLOTS), MAX_SLOTS)

    def use_slots(self, count: int) -> None:
        """Write new shards to the first `count` slots. The others keep their content until it is dropped."""
        self._words[at.SLOTS_IN_USE] = count

    def slot(self, index: int) -> SlotView:
        """A consistent view of a slot: the words are read again if a write began meanwhile."""
        words, base = self._words, at.SLOT + index * at.SLOT_STRIDE
        surplus = index >= self.slots_in_use
        for _ in range(_READS):
            written, captured, committed, dropped = words[base : base + 4].tolist()
            self._fence()
            generation, step, payload_bytes = words[base + at.GENERATION : base + at.PAYLOAD_BYTES + 1].tolist()
            self._fence()
            if words[base + at.WRITTEN] == written:
                break
        else:
            written, captured, dropped = words[base + at.WRITTEN], -1, -1  # it is being written
        if dropped == written or not can_hold(generation, step, payload_bytes):  # also 0 == 0: never written
            return SlotView(index, SlotState.EMPTY, -1, -1, 0, written, surplus)
        state = SlotState.WRITING
        if captured == written:
            state = SlotState.COMMITTED if committed == written else SlotState.CAPTURED
        return SlotView(index, state, generation, step, payload_bytes, written, surplus)

    def begin_write(self, index: int, generation: int, step: int, payload_bytes: int) -> None:
        base = at.SLOT + index * at.SLOT_STRIDE
        self._words[base + at.WRITTEN] += 1  # first: the old bytes no longer count
        self._fence()
        self._words[base + at.GENERATION] = generation
        self._words[base + at.STEP] = step
        self._words[base + at.PAYLOAD_BYTES] = payload_bytes
        self.note_use()
        reach("slot.begun")

    def mark_captured(self, index: int) -> None:
        base = at.SLOT + index * at.SLOT_STRIDE
        reach("slot.before_captured")
        self._fence()  # the bytes become visible before the word that declares them whole
        self._words[base + at.CAPTURED] = self._words[base + at.WRITTEN]

    def drop(self, index: int, sequence: int | None = None) -> None:
        """Empty the slot: its write was given up, or the bytes of `sequence` are bad. A newer write is not affected, as
        it has another sequence."""
        base = at.SLOT + index * at.SLOT_STRIDE
        written = self._words[base + at.WRITTEN]
        if sequence is None or sequence == written:
            self._words[base + at.DROPPED] = written

    def commit(self, index: int, sequence: int, manifest: bytes) -> None:
        """Store the manifest of the bytes captured as `sequence`, then the word that makes them count."""
        base = at.SLOT + index * at.SLOT_STRIDE
        digest = xxhash.xxh3_128_digest(manifest)
        reach("slot.before_manifest")
        self._words[base + at.COMMITTED] = 0  # while it is replaced, the manifest belongs to nothing
        self._fence()
        segment_files.write_at(self.descriptor, manifest, HEADER_BYTES + index * MAX_MANIFEST_BYTES)
        self._words[base + at.MANIFEST_BYTES] = len(manifest)
        self._words[base + at.MANIFEST_HASH_LOW] = int.from_bytes(digest[:8], "little", signed=True)
        self._words[base + at.MANIFEST_HASH_HIGH] = int.from_bytes(digest[8:], "little", signed=True)
        reach("slot.before_committed")
        self._fence()
        self._words[base + at.COMMITTED] = sequence
        self.note_use()
        reach("slot.committed")

    def manifest(self, index: int) -> bytes | None:
        """The manifest of a committed slot; None if the slot is not committed, or the manifest is torn."""
        if self.slot(index).state is not SlotState.COMMITTED:
            return None
        base = at.SLOT + index * at.SLOT_STRIDE
        size_bytes = self._words[base + at.MANIFEST_BYTES]
        if not 0 < size_bytes <= MAX_MANIFEST_BYTES:
            return None
        data = os.pread(self.descriptor, size_bytes, HEADER_BYTES + index * MAX_MANIFEST_BYTES)
        expected = self._words[base + at.MANIFEST_HASH_LOW : base + at.MANIFEST_HASH_HIGH + 1].tobytes()
        return data if xxhash.xxh3_128_digest(data) == expected else None

    # --- the engine's words ---

    def read_world(self) -> WorldWords:
        words = self._words
        generation = words[at.WORLD_GENERATION]  # before the step: that may then only count for an older generation
        self._fence()
        upto = at.seen_step(words[at.ABANDONED_UPTO])  # before the step, or one in between would look abandoned
        self._fence()
        step = at.seen_step(words[at.WORLD_STEP])  # before the holds: a step is held before the world step passes it
        self._fence()
        named = frozenset(map(at.seen_step, words[at.ABANDONED.start : at.ABANDONED.stop].tolist())) - {-1}
        return WorldWords(
            fence_epoch=words[at.FENCE_EPOCH],
            fence_generation=words[at.FENCE_GENERATION],
            generation=generation,
            step=step,
            abandoned=AbandonedSteps(named, step, upto),
            held=frozenset(at.seen_step(words[word] - 1) for word in at.HELD.values()) - {-1},
            kept=at.kept_step(words[at.KEPT]),
        )

    def write_fence(self, epoch: int, generation: int) -> None:
        """Stop trainers of older generations from saving."""
        self._words[at.FENCE_EPOCH] = epoch
        self._words[at.FENCE_GENERATION] = generation

    def begin_world(self, generation: int, step: int, kept: KeptStep = NOTHING_KEPT) -> None:
        """A generation begins at its restore step (-1: none), with nothing else of the one before but `kept`."""
        words = self._words
        self._fence()  # whoever sees any of this sees that the previous generation is fenced
        steps = (at.WORLD_STEP, at.REPLICATED_STEP, at.DURABLE_STEP, at.EMERGENCY_STEP, at.NEXT_SAVE)
        for word in (*steps, at.ABANDONED_UPTO, *at.ABANDONED):
            words[word] = -1
        words[at.PACE], words[at.KEPT] = 0, at.kept_word(kept)
        self.release_holds()
        words[at.PARK] = ParkState.RUNNING
        self._fence()
        words[at.WORLD_GENERATION] = generation
        self._fence()
        words[at.WORLD_STEP] = step

    def forget_run(self) -> None:
        """Reset everything but the slots: it belongs to another run of the job."""
        self._words[at.FENCE_EPOCH :] = memoryview(at.initial_words()).cast("q")[at.FENCE_EPOCH :]

    def keep(self, kept: KeptStep) -> None:
        self._words[at.KEPT] = at.kept_word(kept)

    def advance_world(self, step: int) -> None:
        """All ranks have `step`. Never goes back."""
        self._words[at.WORLD_STEP] = max(step, self._words[at.WORLD_STEP])

    def abandon(self, steps: Collection[int], upto: int = -1) -> None:
        """Some rank will never have `steps`, nor the steps from the world step (exclusive) up to `upto`. Call this
        after `advance_world` with the world step of the same moment. Of `steps` the newest 16 count."""
        self._fence()
        self._words[at.ABANDONED_UPTO] = max(upto, self._words[at.ABANDONED_UPTO])
        newest = set(sorted(steps)[-len(at.ABANDONED) :])
        free = [entry for entry in at.ABANDONED if self._words[entry] not in newest]
        known = [self._words[entry] for entry in at.ABANDONED]
        for entry, step in zip(free, newest.difference(known), strict=False):
            self._words[entry] = step

    def hold(self, tier: Tier, step: int) -> None:
        """This tier writes `step` straight from its slot, which must not be overwritten before `let_go`. A tier holds
        one step, the newest. Call this before the world step passes it."""
        self._words[at.HELD[tier]] = step + 1
        self._fence()

    def let_go(self, tier: Tier, step: int, *, settled: bool = False) -> None:
        """`step` was written or given up; with `settled`, for good. A newer step stays held."""
        self._fence()  # after its bytes were read, and the durable step was noted
        if settled:
            self._words[at.SETTLED[tier]] = max(step + 1, self._words[at.SETTLED[tier]])
        if self._words[at.HELD[tier]] == step + 1:
            self._words[at.HELD[tier]] = 0

    def release_holds(self) -> None:
        """No tier writes anything: a generation or an engine begins."""
        for word in (*at.HELD.values(), *at.SETTLED.values()):
            self._words[word] = 0

    def note_replicated(self, step: int) -> None:
        """This rank's shard of `step` is committed and on every configured peer. Never goes back."""
        self._words[at.REPLICATED_STEP] = max(step, self._words[at.REPLICATED_STEP])

    def note_durable(self, step: int) -> None:
        """This rank's shard of `step` is on a configured disk or persistent tier. Never goes back."""
        self._words[at.DURABLE_STEP] = max(step, self._words[at.DURABLE_STEP])

    def note_lost(self, step: int) -> None:
        """This rank will never have `step`: it is settled in the memory tier."""
        self._words[at.SETTLED[Tier.MEMORY]] = max(step + 1, self._words[at.SETTLED[Tier.MEMORY]])

    def replicated_step(self, generation: int) -> int:
        """Newest step of `generation` given to `note_replicated`, -1 if none."""
        return self._step(at.REPLICATED_STEP, generation)

    def durable_step(self, generation: int) -> int:
        """Newest step of `generation` given to `note_durable`, -1 if none."""
        return self._step(at.DURABLE_STEP, generation)

    def settled_step(self, tier: Tier, generation: int) -> int:
        """Newest step of `generation` that `tier` has or will never have, -1 if none."""
        return self._step(at.SETTLED[tier], generation, less=1)

    def arm(self, generation: int, step: int) -> int:
        """Ask the trainer of `generation` to save and park at `step`; returns its position (-1: none yet).

        If the position is `step` or later, the request came too late: `disarm`. The trainer writes its position before
        it reads the request, and this writes the request before it reads the position, so at least one sees the other.
        """
        self._words[at.EMERGENCY_STEP] = -1
        self._fence()
        self._words[at.EMERGENCY_GENERATION] = generation
        self._fence()
        self._words[at.EMERGENCY_STEP] = step
        self._fence()
        time.sleep(_SETTLE_S)  # until the stores of both sides are visible, in whatever order they were made
        return self.position(generation)

    def disarm(self) -> None:
        self._words[at.EMERGENCY_STEP] = -1

    def position(self, generation: int) -> int:
        """Newest step whose save the trainer of `generation` has begun, -1 if none."""
        return self._step(at.POSITION, generation, of=at.TRAINER_GENERATION)

    def name_save(self, step: int) -> None:
        """The coordinator chose `step` of the current generation, for an interval in seconds."""
        self._words[at.NEXT_SAVE] = step

    def next_save(self, generation: int) -> int:
        """The step given to `name_save` last in this generation, -1 if none."""
        return self._step(at.NEXT_SAVE, generation)

    def set_pace(self, word: int) -> None:
        """Set the factor for intervals in steps of the current generation, as packed by `save_pace`."""
        self._words[at.PACE] = word

    def pace(self, generation: int) -> int:
        """The word given to `set_pace` last in this generation, 0 if none."""
        return max(self._step(at.PACE, generation), 0)

    def aborted_steps(self, generation: int) -> frozenset[int]:
        """The newest few steps that the trainer of `generation` gave up."""
        words, entries = self._words, at.ABORTED_ENTRIES
        count = min(words[at.ABORTED_COUNT], entries) if words[at.TRAINER_GENERATION] == generation else 0
        return frozenset(map(at.seen_step, words[at.ABORTED : at.ABORTED + max(count, 0)].tolist())) - {-1}

    def write_restore(self, words: RestoreWords) -> None:
        text = (words.path or words.error).encode(errors="surrogateescape")[: at.MAX_TEXT_BYTES]
        self._words[at.RESTORE_STATE] = RestoreState.PENDING
        self._fence()
        self._words[at.RESTORE_GENERATION] = words.generation
        self._words[at.RESTORE_STEP] = words.step
        self._words[at.RESTORE_SLOT] = words.slot
        self._words[at.RESTORE_TIER] = _TIERS.index(words.tier)
        self._words[at.RESTORE_SOCKET_BYTES] = words.socket_bytes
        self._words[at.RESTORE_TEXT_BYTES] = len(text)
        segment_files.write_at(self.descriptor, text, at.TEXT_OFFSET)
        self._fence()
        self._words[at.RESTORE_STATE] = words.state  # last: a reader that sees it sees everything above

    def read_restore(self) -> RestoreWords:
        words = self._words
        generation = words[at.RESTORE_GENERATION]  # before the state, which may be of an older one
        self._fence()
        state = RestoreState(words[at.RESTORE_STATE])
        self._fence()
        text_bytes = max(0, min(words[at.RESTORE_TEXT_BYTES], at.MAX_TEXT_BYTES))
        text = os.pread(self.descriptor, text_bytes, at.TEXT_OFFSET)
        has_path = state in (RestoreState.FILE, RestoreState.FOLDER)
        has_path = has_path or (state is RestoreState.READY and words[at.RESTORE_SLOT] < 0)
        # Of paths all bytes count, of which NUL is none.
        content = text.decode(errors="surrogateescape" if has_path else "replace").replace("\0", "?")
        return RestoreWords(
            generation=generation,
            state=state,
            step=words[at.RESTORE_STEP],
            slot=words[at.RESTORE_SLOT],
            tier=_TIERS[words[at.RESTORE_TIER] % len(_TIERS)],
            socket_bytes=words[at.RESTORE_SOCKET_BYTES],
            error="" if has_path else content,
            path=content if has_path else "",
        )

    def restore_answer(self, generation: int) -> RestoreAnswer:
        """The newest answer of the trainer of `generation` to the restore."""
        answered_by, answer = divmod(self._words[at.RESTORE_ANSWER], len(RestoreAnswer))
        return RestoreAnswer(answer) if answered_by == generation else RestoreAnswer.NONE

    def withdraw_file(self, words: RestoreWords) -> bool:
        """Replace an offered file (state FILE) by `words`. False if the trainer is reading the file already.

        The trainer answers READING_FILE before it checks the offer again, and this writes before it reads the answer,
        so one of them sees the other. A trainer that sees the withdrawal goes back to NONE.
        """
        self.write_restore(words)
        time.sleep(_SETTLE_S)  # until the stores of both sides are visible
        return self.restore_answer(words.generation) is not RestoreAnswer.READING_FILE

    # --- the trainer's words ---

    def attach_trainer(self, generation: int) -> None:
        """A trainer of `generation` begins. It has saved nothing yet."""
        self._words[at.POSITION] = -1
        self._fence()
        self._words[at.ABORTED_COUNT] = 0
        self._words[at.TRAINER_GENERATION] = generation

    def write_position(self, step: int) -> None:
        """The save of `step` begins. Call this before `emergency_step`."""
        self._words[at.POSITION] = step
        self._fence()

    def note_aborted(self, step: int) -> None:
        """This rank will never have `step`. Unlike a notice, this cannot be lost."""
        count = self._words[at.ABORTED_COUNT]
        self._words[at.ABORTED + count % at.ABORTED_ENTRIES] = step
        self._words[at.ABORTED_COUNT] = count + 1

    def answer_restore(self, generation: int, answer: RestoreAnswer) -> None:
        """Report how far this trainer is with the restore. After READING_FILE, check `read_restore` again."""
        self._words[at.RESTORE_ANSWER] = generation * len(RestoreAnswer) + answer
        self._fence()

    def ask_for_layout(self, generation: int) -> None:
        """The state of this trainer has another layout than its shard: it needs those of all ranks."""
        self._words[at.LAYOUT_ASKED] = generation + 1

    def asks_for_layout(self, generation: int) -> bool:
        """Whether the trainer of `generation` has called `ask_for_layout`."""
        return self._words[at.LAYOUT_ASKED] == generation + 1

    def emergency_step(self, generation: int) -> int:
        """The step at which this generation must save and park, -1 if there is none."""
        return self._step(at.EMERGENCY_STEP, generation, of=at.EMERGENCY_GENERATION)

    @property
    def park(self) -> ParkState:
        return ParkState(self._words[at.PARK])

    @park.setter
    def park(self, state: ParkState) -> None:
        self._words[at.PARK] = state

    def _step(self, word: int, generation: int, *, of: int = at.WORLD_GENERATION, less: int = 0) -> int:
        return at.seen_step(self._words[word] - less) if self._words[of] == generation else -1

    def close(self) -> None:
        if self._mapping is not None:
            cast("memoryview", self._words).release()
            self._mapping.close()
        os.close(self.descriptor)
