"""Copy a training state into a slot.

What is known of a structure (names, shapes, dtypes, offsets, views of the slots) is kept from one save to the next, so
that in steady state nothing is allocated: one walk over the state, one copy per tensor, one header.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from ckpt_engine import shard_format
from ckpt_engine.copying import TensorCopy, copy_whole
from ckpt_engine.device_copies import CudaStreams, DeviceJob, PinnedSlots, Streams
from ckpt_engine.optimizer_watch import Extent, extent_of
from ckpt_engine.running_capture import Copies, RunningCapture
from ckpt_engine.shard_format import LENGTH_BYTES, Block, TensorHeader
from ckpt_engine.state_tree import FlatState, flatten
from flyball.contracts.errors import CheckpointError, UnsupportedState

STATE_KEY = "flyball.state"  # the JSON tree, in the safetensors metadata
FORMAT_KEY = "flyball.format"
FORMAT = "1"

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

SMALL_BYTES = 16 << 10  # tensors up to this size are copied at once: to speak of them would cost more
_HEADER_STEP_BYTES = 4096  # headers are padded to a multiple of it, less the length field, so that data is aligned
_Signature = tuple[tuple[str, torch.Size, torch.dtype, torch.device, Block | None], ...]


@dataclass(slots=True)
class _Plan:
    """Where everything goes, for states of one structure."""

    signature: _Signature
    header_capacity: int
    tensors: dict[str, TensorHeader]
    sharding: dict[str, str]  # the metadata entry, if any tensor is not whole
    payload_bytes: int
    views: dict[int, tuple[memoryview, dict[str, torch.Tensor]]] = field(default_factory=dict)  # by slot

    def slot_views(self, slot: int, payload: memoryview) -> dict[str, torch.Tensor]:
        """Tensors that are the slot's memory. Made anew when the slot got a new file."""
        known = self.views.get(slot)
        if known is None or known[0] is not payload:
            known = self.views[slot] = (payload, self._make_views(payload))
        return known[1]

    def _make_views(self, payload: memoryview) -> dict[str, torch.Tensor]:
        data = torch.frombuffer(payload, dtype=torch.uint8)[LENGTH_BYTES + self.header_capacity :]
        views = {}
        for name, shape, dtype, _, _ in self.signature:
            begin, end = self.tensors[name].data_offsets
            views[name] = data[begin:end].view(dtype).view(shape)
        return views


@dataclass(frozen=True, slots=True)
class PreparedCapture:
    """A state that was taken apart, its bytes counted and its header encoded; nothing is copied yet."""

    flat: FlatState
    plan: _Plan
    header: bytes
    streams: Streams
    pinned: PinnedSlots

    @property
    def payload_bytes(self) -> int:
        return self.plan.payload_bytes

    def begin(self, slot: int, payload: memoryview, *, lazy: Collection[Extent] = ()) -> Copies:
        """Write the header and all small tensors into `payload`, the slot's memory, `payload_bytes` long; the rest is
        returned. `lazy` is the memory of tensors that may be copied later, because their writers can be held back."""
        shard_format.write_header(payload, self.header, self.plan.header_capacity)
        views = self.plan.slot_views(slot, payload)
        copies = Copies([], [], DeviceJob(self.streams), DeviceJob(self.streams))
        for name, tensor in self.flat.tensors.items():
            view = views[name]
            on_device = self.streams.owns(tensor)
            if view.nbytes <= SMALL_BYTES and not on_device:
                copy_whole(view, tensor)
            elif lazy and extent_of(tensor) in lazy and not tensor.is_inference():
                source = tensor.detach()  # `tensor.data = ...` does not replace the memory of this one
                copy = TensorCopy(name, source, view, version=tensor._version)
                copies.lazy_device.add(copy) if on_device else copies.lazy.append(copy)
            else:
                copy = TensorCopy(name, tensor, view)
                copies.eager_device.add(copy) if on_device else copies.eager.append(copy)
        if copies.eager_device.copies or copies.lazy_device.copies:
            self.pinned.pin(slot, payload)
        return copies

    def copy_into(self, slot: int, payload: memoryview) -> None:
        """Write the whole shard, in this thread. Raises CheckpointError if it cannot be."""
        errors: list[str] = []
        running = RunningCapture(self.begin(slot, payload), lambda error, _: errors.append(error), lambda _: None)
        running.start()
        running.run()
        if errors[0]:
            raise CheckpointError(f"The state could not be copied: {errors[0]}.")


class Capture:
    """Prepares states for their slots; keeps the plan of the newest structure."""

    def __init__(self, streams: Streams | None = None) -> None:
        self._plan: _Plan | None = None
        self._streams = streams or CudaStreams()
        self._pinned = PinnedSlots(self._streams)

    def prepare(self, state: Mapping[str, object]) -> PreparedCapture:
        """Take `state` apart (see `state_tree.flatten`); raises UnsupportedState. Call it when no capture is running:
        a new structure lets go of the slots."""
        flat = flatten(state)
        blocks = flat.blocks
        signature = tuple(
            (name, tensor.shape, tensor.dtype, tensor.device, blocks.get(name)) for name, tensor in flat.tensors.items()
        )
        plan = self._plan
        if plan is None or plan.signature != signature:
            plan = self._adopt(_make_plan(signature, len(flat.tree)))
        header = _encode(flat.tree, plan)
        if len(header) > plan.header_capacity:  # values grew: move the data once, by more than they grew
            plan = self._adopt(_make_plan(signature, 2 * len(flat.tree)))
            header = _encode(flat.tree, plan)
        return PreparedCapture(flat, plan, header, self._streams, self._pinned)

    def _adopt(self, plan: _Plan) -> _Plan:
        """Views of the old slots go with the old plan: their memory is free before the new slots are made."""
        self._pinned.unpin_all()
        self._plan = plan
        return plan

    def close(self) -> None:
        """Let go of the slots."""
        self._pinned.unpin_all()
        self._plan = None


def _encode(tree: str, plan: _Plan) -> bytes:
    return shard_format.encode_header({FORMAT_KEY: FORMAT, STATE_KEY: tree, **plan.sharding}, plan.tensors)


def _make_plan(signature: _Signature, tree_chars: int) -> _Plan:
    """Tensors with wide elements first: without a gap between them, each is aligned to its element all the same."""
    tensors: dict[str, TensorHeader] = {}
    offset = 0
    for name, shape, dtype, _, _ in sorted(signature, key=lambda entry: -entry[2].itemsize):
        if dtype not in DTYPE_NAMES:
            raise UnsupportedState(
                f"The tensor {name!r} has dtype {dtype}, which the safetensors format does not have.",
                hint="convert it, or leave it out of the state",
            )
        end = offset + shape.numel() * dtype.itemsize
        tensors[name] = TensorHeader(DTYPE_NAMES[dtype], tuple(shape), (offset, end))
        offset = end
    # Quotes in the tree are escaped in the header, and its numbers grow: leave room, so that the offsets stay.
    blocks = {name: block for name, _, _, _, block in signature if block is not None}
    sharding = {shard_format.SHARDING_KEY: shard_format.encode_blocks(blocks)} if blocks else {}
    needed = len(shard_format.encode_header(sharding, tensors)) + 2 * tree_chars + 1024
    pages = -(-(LENGTH_BYTES + needed) // _HEADER_STEP_BYTES)
    capacity = pages * _HEADER_STEP_BYTES - LENGTH_BYTES
    if capacity > shard_format.MAX_HEADER_BYTES:
        raise UnsupportedState(
            f"What the state holds beside tensors takes {tree_chars} characters.", hint="keep large data in tensors"
        )
    return _Plan(signature, capacity, tensors, sharding, LENGTH_BYTES + capacity + offset)
