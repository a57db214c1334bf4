"""Load a step into a state of another layout: other ranks, sharded in another way, or whole.

Each rank reads the blocks of its own tensors out of the shards of all ranks, and only the chunks with bytes of them.
Before a byte is written, every element of every tensor has a shard that it comes from.

A value that was not sharded comes from one shard: rank R takes it from the shard of rank R, or, if fewer ranks saved,
of rank R modulo their number. So a rank's own values (a random generator, a data loader's position) are taken over as
long as the ranks are the same. If ranks have different names, as pipeline stages have, rank R takes the next shard
after that with the names that it needs; if there is none, each name from the next shard that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.format.coverage import Box, cover, range_of
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import rank_of_manifest, shard_name
from ckpt_engine.format.stored_layout import StoredShard
from ckpt_engine.trainer.restore import stage_names
from ckpt_engine.trainer.restore.load_shard import filled_in, opened_shard, read_description
from ckpt_engine.trainer.restore.open_shard import OpenShard, note_written
from ckpt_engine.trainer.restore.piece_reads import PieceRead, read_pieces
from ckpt_engine.trainer.restore.restore_targets import (
    DTYPES,
    Matching,
    Stored,
    memory_of,
    mismatch,
    take_memory,
)
from ckpt_engine.trainer.state import sharded_tensors, tree_building
from ckpt_engine.trainer.state.state_tree import is_lazy
from flyball.contracts.errors import CorruptShard, RestoreFailed


def load_step(folder: str | Path, state: MutableMapping[str, object], *, rank: int) -> Manifest:
    """Load a step's folder (`g<generation>/step<step>` of a disk or persistent tier, with the shards of all ranks) into
    rank `rank`'s `state`, whatever the number of ranks and the sharding. All shards are open meanwhile. Otherwise as
    `load_shard.restore_into`. Returns the manifest of the shard that the values that were not sharded came from.

    Raises RestoreFailed if a shard, or part of a tensor, is in no shard; StateMismatch; CorruptShard; OSError.
    """
    folder = Path(folder)
    stored = shards_in(folder)
    with ExitStack() as opened:
        shards = [
            OpenShard(opened.enter_context(opened_shard(folder / shard_name(number), shard)), shard.manifest)
            for number, shard in enumerate(stored)
        ]
        load = StepLoad(state, shards, rank=rank)
        load.run()
    return stored[load.own_rank].manifest


def shards_in(folder: Path) -> list[StoredShard]:
    """Those of all ranks that saved the step, by rank."""
    found = {
        number: read_description(folder / shard_name(number))
        for path in folder.iterdir()
        if (number := rank_of_manifest(path.name)) is not None
    }
    if not found:
        raise RestoreFailed(f"{folder} holds no shard.", hint="name a folder like g1/step40")
    first = found[min(found)].manifest
    for number, (manifest, _, _) in sorted(found.items()):
        if _origin(manifest) != _origin(first) or manifest.rank != number:
            raise CorruptShard(f"The shard of rank {number} in {folder} is not of the same step as the others.")
    missing = sorted(set(range(first.world_size)) - found.keys())
    if missing:
        raise RestoreFailed(
            f"{folder} lacks the shards of rank {', '.join(map(str, missing[:8]))}"
            f"{' and others' if len(missing) > 8 else ''}; {first.world_size} ranks saved the step.",
            hint="a disk tier has the shards of its own host's ranks only: copy them together, or use another tier",
        )
    return [found[number] for number in range(first.world_size)]


def _origin(manifest: Manifest) -> tuple[object, ...]:
    return manifest.job, manifest.run, manifest.generation, manifest.step, manifest.world_size


class StepLoad:
    """The load of a step into one rank's state, compared and planned. Nothing was written yet."""

    def __init__(
        self,
        state: MutableMapping[str, object],
        shards: Sequence[OpenShard],
        *,
        rank: int,
        nearness: Callable[[int], int] = lambda number: 0,
    ) -> None:
        """`shards` by the rank that saved them. What several have is read from the one with the least
        `nearness(number)`. Raises RestoreFailed, StateMismatch, CorruptShard; see `load_step`."""
        self._state = state
        self.own_rank = _own_rank(state, shards, rank)
        self._own = own = shards[self.own_rank]
        own.know(shards)
        self._matching = matching = _AnyLayout()
        self._targets = list(_targets(own, own.match(state, matching), matching))
        turns = [(rank + turn) % len(shards) for turn in range(len(shards))]  # so that not all ranks read the same
        in_turn = [shards[number] for number in sorted(turns, key=nearness)]
        self._numbers = {shard: number for number, shard in enumerate(shards)}
        self._parts = _plan(self._targets, own, in_turn)

    def chunks(self) -> dict[int, list[int]]:
        """The chunks that `run` will read, by the number of their shard."""
        return {
            self._numbers[shard]: shard.chunks((part.begin, part.size_bytes) for part in parts)
            for shard, parts in self._parts.items()
        }

    def run(self) -> None:
        """Read everything, and fill the state. Raises CorruptShard, OSError; the state may then be filled in part, so
        load it again."""
        state, templates = self._state, self._matching.templates
        for shard, parts in self._parts.items():
            read_pieces(shard.fill, parts)
        note_written(self._matching.claims.values())
        targets = {target.name: target for target in self._targets}
        saved = self._own.build(state, lambda tag, content: _value(tag, content, targets, templates))
        for key in state:
            state[key] = filled_in(state[key], saved[key], key)


def _own_rank(state: Mapping[str, object], shards: Sequence[OpenShard], rank: int) -> int:
    """The rank whose description of the state, and values that were not sharded, this one takes. If ranks have
    different names, as pipeline stages have, one with the names of `state`. If there is none, the description is put
    together from all. Raises StateMismatch."""
    usual = rank % len(shards)
    if not stage_names.names_differ([shard.header.tensors for shard in shards]):
        return usual
    turns = [(rank + turn) % len(shards) for turn in range(len(shards))]
    for number in turns:
        if stage_names.is_stage_of(shards[number].entries, state):
            return number
    nodes = [shards[number].entries for number in turns]
    shards[usual].entries = stage_names.fitted(nodes, state, "state")
    return usual


class _AnyLayout(Matching):
    """`templates` has what decides the layout of a value: the tensor that is filled, or the parameter that an
    optimizer's new tensor belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.templates: dict[str, torch.Tensor] = {}

    def claim(self, target: torch.Tensor, saved: Stored, path: str) -> None:
        known = self.templates.setdefault(saved.name, target)
        if known is not target and _layout(known) != _layout(target):
            raise mismatch(path, "shares its values with a tensor that is sharded in another way")
        self.claims.setdefault(saved.name, target)

    def claim_state(self, target: torch.Tensor, saved: Stored) -> None:
        self.claim(target, saved, saved.name)

    def _optimizer(self, target: torch.optim.Optimizer, saved: Any, path: str) -> None:  # noqa: ANN401 - any state
        super()._optimizer(target, saved, path)
        parameters = [parameter for group in target.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            entries = saved["state"].get(number, {})
            for found in entries.values() if isinstance(entries, Mapping) else ():
                if (
                    isinstance(found, Stored)
                    and not is_lazy(parameter)
                    and found.block.global_shape == tuple(parameter.shape)
                ):
                    self.templates.setdefault(found.name, parameter)


# --- where the bytes go ---


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """A tensor to fill. `memory` is this rank's block of it, at `box` in the whole tensor; both as stored: a complex
    number is two elements. `owner` is the tensor of the state that has this memory, None if it is new."""

    name: str
    memory: torch.Tensor
    box: Box
    owner: torch.Tensor | None


def _targets(own: OpenShard, names: Mapping[str, Stored], matching: _AnyLayout) -> Iterator[_Target]:
    taken: dict[torch.device, list[tuple[int, int]]] = {}
    for name, saved in names.items():
        entry = own.known.tensors[name]
        template = matching.templates.get(name)
        layout = _layout(template)
        if template is None and saved.layout is not None:
            raise mismatch(name, "was saved sharded, and the state has no tensor that says how to shard it")
        whole = own.known.blocks[name].global_shape if name in own.known.blocks else entry.shape
        parts = whole[len(saved.block.global_shape) :]  # of a complex number
        box = Box((0,) * len(whole), whole)
        if template is not None and layout is not None:
            local = tuple(sharded_tensors.local_block(template).shape)  # type: ignore[arg-type]
            box = Box((*layout.block.offsets, *(0 for _ in parts)), (*local, *parts))
        owner = matching.claims.get(name)
        memory = None if owner is None else memory_of(owner)
        if memory is None or not take_memory(taken.setdefault(memory.device, []), memory):
            memory, owner = torch.empty(box.shape, dtype=DTYPES[entry.dtype]), None
        yield _Target(name, memory, box, owner)


def _layout(tensor: torch.Tensor | None) -> sharded_tensors.ShardLayout | None:
    if tensor is None or not sharded_tensors.is_sharded(tensor):
        return None
    return sharded_tensors.layout_of(tensor)  # type: ignore[arg-type]


def _value(
    tag: str,
    content: Any,  # noqa: ANN401 - JSON
    targets: Mapping[str, _Target],
    templates: Mapping[str, torch.Tensor],
) -> Any:  # noqa: ANN401 - any state
    if tag == "$dtensor":
        ((tag, content),) = content["local"].items()
    target = targets[content]
    if target.owner is not None:
        return target.owner  # filled already; to wrap its memory in another tensor would take longer than to fill it
    local = tree_building.from_tensor(tag, target.memory)
    template = templates.get(content)
    if template is None or not sharded_tensors.is_sharded(template):
        return local
    return sharded_tensors.like(template, local)  # type: ignore[arg-type]


# --- where they come from ---


def _plan(targets: Sequence[_Target], own: OpenShard, shards: Sequence[OpenShard]) -> dict[OpenShard, list[PieceRead]]:
    """What to read from each shard. Raises RestoreFailed for an element that no shard has."""
    parts: dict[int, list[PieceRead]] = {index: [] for index in range(len(shards))}
    for target in targets:
        stored = _stored_blocks(target.name, own, shards)
        pieces, missing = cover(target.box, (box for _, box in stored))
        if missing:
            raise RestoreFailed(
                f"{sum(box.elements for box in missing)} elements of {target.name!r}, the first of them in "
                f"{missing[0]}, are in no shard of the step.",
                hint="restore another step; `flyball ckpt verify` names what this one lacks",
            )
        for piece in pieces:
            index, block = stored[piece.block]
            parts[index].append(_part(target, shards[index], block, piece.box))
    return {shards[index]: wanted for index, wanted in parts.items() if wanted}


def _stored_blocks(name: str, own: OpenShard, shards: Sequence[OpenShard]) -> list[tuple[int, Box]]:
    """The blocks of a tensor: which shard has it, and its place. Of one that was not sharded, this rank's, or that of a
    rank that wrote it for all."""
    block, dtype = own.known.blocks.get(name), own.known.tensors[name].dtype
    if block is None:
        shape = own.known.tensors[name].shape
        holder = own if name in own.header.tensors else next(s for s in shards if name in s.header.tensors)
        return [(shards.index(holder), Box((0,) * len(shape), shape))]
    found = []
    for index, shard in enumerate(shards):
        other = shard.header.blocks.get(name)
        if other is None:
            continue
        entry = shard.header.tensors[name]
        if (other.global_shape, entry.dtype) != (block.global_shape, dtype):
            raise CorruptShard(f"The shards hold blocks of different tensors under the name {name!r}.")
        found.append((index, Box(other.offsets, entry.shape)))
    return found


def _part(target: _Target, shard: OpenShard, block: Box, piece: Box) -> PieceRead:
    stored = range_of(piece, block)
    begin = shard.begin_of(target.name) + stored.begin * target.memory.element_size()
    place = target.memory
    if piece != target.box:
        inside = zip(piece.offsets, target.box.offsets, piece.shape, target.box.shape, strict=True)
        for dimension, (offset, first, size, whole) in enumerate(inside):
            if size != whole:
                place = place.narrow(dimension, offset - first, size)
    return PieceRead(begin, stored, place, place.dtype)
