"""Copy a training state into a slot.

What is known of a structure (names, shapes, dtypes, offsets, views of the slots) is kept from one save to the next, so
that in steady state nothing is allocated: one walk over the state, one copy per tensor, one header.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format
from ckpt_engine.format.shard_format import LENGTH_BYTES, Block, TensorHeader
from ckpt_engine.slots.memory_plan import readable_size
from ckpt_engine.slots.source_digests import SourceDigests
from ckpt_engine.trainer.capture.copying import TensorCopy, copy_whole, is_plain, move_bytes
from ckpt_engine.trainer.capture.device_copies import CudaStreams, DeviceJob, DeviceStreams, PinnedSlots
from ckpt_engine.trainer.capture.kept_structure import StateReader
from ckpt_engine.trainer.capture.live_samples import Samples, Windows
from ckpt_engine.trainer.capture.optimizer_watch import Extent, extent_of
from ckpt_engine.trainer.capture.running_capture import Copies, RunningCapture
from ckpt_engine.trainer.state.state_tree import FlatState
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


@dataclass(frozen=True, slots=True)
class _SlotViews:
    """Tensors that are a slot's memory, in the order of the plan."""

    payload: memoryview
    address: int  # of its first byte
    tensors: list[torch.Tensor]
    addresses: list[int]


@dataclass(slots=True)
class _Routes:
    """How each tensor gets into a slot, by its number in the plan; as long as nothing changes that decides it."""

    structure: object
    addresses: list[int]
    lazy_extents: Collection[Extent]
    is_plain: list[bool]
    moved: list[int] = field(default_factory=list)  # small, plain bytes: at once
    copied: list[int] = field(default_factory=list)  # small, by torch: at once
    eager: list[int] = field(default_factory=list)
    lazy: list[int] = field(default_factory=list)
    eager_device: list[int] = field(default_factory=list)
    lazy_device: list[int] = field(default_factory=list)
    windows: Windows | None = None
    sample_numbers: dict[int, int] = field(default_factory=dict)  # of those of `lazy` that are plain

    def read_samples(self, sizes: list[int]) -> Samples:
        """A few bytes of each of those."""
        if self.windows is None:
            plain = [index for index in self.lazy if self.is_plain[index]]
            self.windows = Windows((self.addresses[index], sizes[index]) for index in plain)
            self.sample_numbers = {index: number for number, index in enumerate(plain)}
        return self.windows.read()


@dataclass(slots=True)
class _Plan:
    """Where everything goes, for states of one structure."""

    signature: _Signature
    structure: object  # `FlatState.structure` of the newest state with this signature
    header_capacity: int
    tensors: dict[str, TensorHeader]
    tensors_json: bytes
    sharding: dict[str, str]  # the metadata entry, if any tensor is not whole
    payload_bytes: int
    sizes: list[int] = field(init=False)
    views: dict[int, _SlotViews] = field(default_factory=dict)  # by slot
    routes: _Routes | None = None

    def __post_init__(self) -> None:
        offsets = [self.tensors[name].data_offsets for name, *_ in self.signature]
        self.sizes = [end - begin for begin, end in offsets]

    def slot_views(self, slot: int, payload: memoryview) -> _SlotViews:
        """Made anew when the slot got a new file."""
        known = self.views.get(slot)
        if known is None or known.payload is not payload:
            known = self.views[slot] = self._make_views(payload)
        return known

    def _make_views(self, payload: memoryview) -> _SlotViews:
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        data = whole[LENGTH_BYTES + self.header_capacity :]
        views = []
        for name, shape, dtype, _, _ in self.signature:
            begin, end = self.tensors[name].data_offsets
            views.append(data[begin:end].view(dtype).view(shape))
        return _SlotViews(payload, whole.data_ptr(), views, [view.data_ptr() for view in views])

    def find_routes(self, flat: FlatState, lazy: Collection[Extent], streams: DeviceStreams) -> _Routes:
        """`lazy` is never changed, but replaced."""
        addresses = [tensor.data_ptr() for tensor in flat.tensors.values()]
        known = self.routes
        if (
            known is None
            or known.lazy_extents is not lazy
            or known.structure is not flat.structure
            or flat.structure is None
            or known.addresses != addresses
        ):
            tensors = flat.tensors.values()
            known = self.routes = _Routes(flat.structure, addresses, lazy, [is_plain(tensor) for tensor in tensors])
            for index, tensor in enumerate(tensors):
                _route(known, index, tensor, self.sizes[index], on_device=streams.owns(tensor)).append(index)
        return known


def _route(routes: _Routes, index: int, tensor: torch.Tensor, size_bytes: int, *, on_device: bool) -> list[int]:
    if size_bytes <= SMALL_BYTES and not on_device:
        return routes.moved if routes.is_plain[index] else routes.copied
    if routes.lazy_extents and extent_of(tensor) in routes.lazy_extents and not tensor.is_inference():
        return routes.lazy_device if on_device else routes.lazy
    return routes.eager_device if on_device else routes.eager


@dataclass(frozen=True, slots=True)
class PreparedCapture:
    """A state that was taken apart, its bytes counted and its header encoded; nothing is copied yet."""

    flat: FlatState
    plan: _Plan
    header: bytes
    streams: DeviceStreams
    pinned: PinnedSlots

    @property
    def payload_bytes(self) -> int:
        return self.plan.payload_bytes

    def begin(self, slot: int, payload: memoryview, *, lazy: Collection[Extent] = ()) -> Copies:
        """Write the header and all small tensors into `payload`, the slot's memory, `payload_bytes` long; the rest is
        returned. `lazy` is the memory of tensors that may be copied later, because their writers can be held back."""
        shard_format.write_header(payload, self.header, self.plan.header_capacity)
        views = self.plan.slot_views(slot, payload)
        routes = self.plan.find_routes(self.flat, lazy, self.streams)
        names, tensors, sizes = list(self.flat.tensors), list(self.flat.tensors.values()), self.plan.sizes
        for index in routes.moved:
            move_bytes(views.addresses[index], routes.addresses[index], sizes[index])
        for index in routes.copied:
            copy_whole(views.tensors[index], tensors[index])

        samples = routes.read_samples(sizes) if routes.lazy else None
        sampled = routes.sample_numbers

        def copies_of(indices: list[int], *, lazy: bool) -> list[TensorCopy]:
            return [
                TensorCopy(
                    names[index],
                    tensors[index],
                    views.tensors[index],
                    version=tensors[index]._version if lazy else None,
                    samples=samples if index in sampled else None,
                    sample_number=sampled.get(index, 0),
                    is_plain=routes.is_plain[index],
                )
                for index in indices
            ]

        copies = Copies(
            copies_of(routes.eager, lazy=False),
            copies_of(routes.lazy, lazy=True),
            DeviceJob(self.streams, copies_of(routes.eager_device, lazy=False)),
            DeviceJob(self.streams, copies_of(routes.lazy_device, lazy=True)),
            SourceDigests(views.address, self.payload_bytes),
        )
        if routes.eager_device or routes.lazy_device:
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

    def __init__(self, streams: DeviceStreams | None = None) -> None:
        self._reader = StateReader()
        self._plan: _Plan | None = None
        self._streams = streams or CudaStreams()
        self._pinned = PinnedSlots(self._streams)

    def prepare(self, state: Mapping[str, object]) -> PreparedCapture:
        """Take `state` apart (see `state_tree.flatten`); raises UnsupportedState. Call it when no capture is running:
        a new structure lets go of the slots."""
        flat = self._reader.flatten(state)
        plan = self._plan_of(flat)
        header = _encode(flat.tree, plan)
        if len(header) > plan.header_capacity:  # values grew: move the data once, by more than they grew
            plan = self._adopt(_make_plan(plan.signature, flat, 2 * len(flat.tree)))
            header = _encode(flat.tree, plan)
        return PreparedCapture(flat, plan, header, self._streams, self._pinned)

    def _plan_of(self, flat: FlatState) -> _Plan:
        plan, blocks = self._plan, flat.blocks
        if plan is not None and flat.structure is not None and plan.structure is flat.structure:
            return plan
        signature = tuple(
            (name, tensor.shape, tensor.dtype, tensor.device, blocks.get(name)) for name, tensor in flat.tensors.items()
        )
        if plan is None or plan.signature != signature:
            return self._adopt(_make_plan(signature, flat, len(flat.tree)))
        plan.structure = flat.structure
        return plan

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
    return shard_format.join_header({FORMAT_KEY: FORMAT, STATE_KEY: tree, **plan.sharding}, plan.tensors_json)


def _make_plan(signature: _Signature, flat: FlatState, tree_chars: int) -> _Plan:
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
    tensors_json = shard_format.encode_tensors(tensors)
    needed = len(shard_format.join_header(sharding, tensors_json)) + 2 * tree_chars + 1024
    pages = -(-(LENGTH_BYTES + needed) // _HEADER_STEP_BYTES)
    capacity = pages * _HEADER_STEP_BYTES - LENGTH_BYTES
    if capacity > shard_format.MAX_HEADER_BYTES:
        raise UnsupportedState(
            f"The names and shapes of the state's {len(tensors)} tensors take {len(tensors_json)} bytes, and what it "
            f"holds beside tensors {tree_chars} characters: more than the header of a safetensors file has room for.",
            hint="keep large data in tensors, and many small tensors in a few large ones",
        )
    payload_bytes = LENGTH_BYTES + capacity + offset
    if payload_bytes > manifests.MAX_PAYLOAD_BYTES:
        raise UnsupportedState(
            f"The state of this rank takes {readable_size(payload_bytes)}, and a shard has at most "
            f"{readable_size(manifests.MAX_PAYLOAD_BYTES)}.",
            hint="have more ranks share the state, so that each has less of it",
        )
    return _Plan(signature, flat.structure, capacity, tensors, tensors_json, sharding, payload_bytes)
