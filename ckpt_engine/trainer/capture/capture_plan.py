"""Everything that is kept from one save to the next while the structure of the state stays the same.

A plan knows names, shapes, dtypes, offsets and the header, views of the slots, and how each tensor gets there. So in
steady state nothing is allocated.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

import torch

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import sealed_file, shard_format
from ckpt_engine.format.shard_format import LENGTH_BYTES, Block, TensorHeader
from ckpt_engine.rules.memory_plan import readable_size
from ckpt_engine.trainer.capture.copy_threads import is_plain
from ckpt_engine.trainer.capture.device_copies import DeviceStreams
from ckpt_engine.trainer.capture.kept_structure import KeptStructure
from ckpt_engine.trainer.state.state_tree import FlatState
from flyball.contracts.errors import UnsupportedState

STATE_KEY = "flyball.state"  # the JSON tree, in the safetensors metadata
FORMAT_KEY = "flyball.format"
FORMAT = "2"  # with `$metadata`, more classes of plain values, and in files what `exact_tensors` keeps
READ_FORMATS = ("1", "2")
DEVICES_KEY = "flyball.devices"  # of a sealed file: {device: names of its tensors}, for all but the CPU

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

SMALL_BYTES = 16 << 10  # smaller tensors are copied by the caller: handing them to a thread would cost more
_HEADER_STEP_BYTES = 4096  # headers are padded to a multiple of it, less the length field, so that data is aligned
_Signature = tuple[tuple[str, torch.Size, torch.dtype, torch.device, Block | None], ...]


@dataclass(slots=True)
class SlotViews:
    """A slot's memory as tensors, in the order of the plan."""

    payload: memoryview
    address: int  # of its first byte
    tensors: list[torch.Tensor]
    addresses: list[int]
    is_pinned: bool | None = None  # None: not tried

    def pin(self, streams: DeviceStreams, device: torch.device) -> None:
        """Let devices copy to the slot directly. A refusal lasts: to ask again costs time, and a line in the log."""
        if self.is_pinned is None:
            self.is_pinned = streams.pin(device, self.address, len(self.payload))

    def unpin(self, streams: DeviceStreams) -> None:
        if self.is_pinned:
            streams.unpin(self.address)
        self.is_pinned = None


@dataclass(slots=True)
class Routes:
    """How each tensor gets into a slot, as indexes into the plan.

    Valid until a large tensor moves. Small ones may: a random generator's state always does.
    """

    addresses: list[int]  # of the newest state
    moved: list[int] = field(default_factory=list)  # small and plain: by one memcpy
    plain: list[int] = field(default_factory=list)  # large: in pieces, by several threads
    strided: list[int] = field(default_factory=list)  # by torch
    on_device: list[int] = field(default_factory=list)

    def add(self, index: int, tensor: torch.Tensor, size_bytes: int, *, on_device: bool) -> None:
        if on_device:
            self.on_device.append(index)
        elif not is_plain(tensor):
            self.strided.append(index)
        else:
            (self.moved if size_bytes <= SMALL_BYTES else self.plain).append(index)

    def is_valid(self, addresses: list[int]) -> bool:
        """Whether they also hold for a state with these addresses."""
        return all(self.addresses[index] == addresses[index] for index in (*self.plain, *self.strided, *self.on_device))


@dataclass(slots=True)
class CapturePlan:
    """The parts that all states of one structure share."""

    signature: _Signature
    structure: KeptStructure | None  # of the newest state with this signature; None if it cannot be kept
    header_capacity: int
    tensors: dict[str, TensorHeader]
    tensors_json: bytes
    metadata: dict[str, str]  # the entries that stay: of sharded tensors, and of devices
    payload_bytes: int
    seal_bytes: int  # the last of them, for the manifest; 0: it is in another file
    sizes: list[int] = field(init=False)
    _views: dict[int, SlotViews] = field(default_factory=dict)  # by slot
    _routes: Routes | None = None

    def __post_init__(self) -> None:
        offsets = [self.tensors[name].data_offsets for name, *_ in self.signature]
        self.sizes = [end - begin for begin, end in offsets]

    def adopt(self, structure: KeptStructure | None) -> None:
        """The newest state has the same signature, and a structure found anew."""
        if structure is not self.structure:
            self.structure, self._routes = structure, None

    def encode_header(self, tree: str) -> bytes:
        """The header's JSON for a state with this tree, at most `header_capacity` bytes if it fits."""
        return shard_format.join_header({FORMAT_KEY: FORMAT, STATE_KEY: tree, **self.metadata}, self.tensors_json)

    def slot_views(self, slot: int, payload: memoryview, streams: DeviceStreams) -> SlotViews:
        """Made again when the slot got a new file."""
        known = self._views.get(slot)
        if known is None or known.payload is not payload:
            if known is not None:
                known.unpin(streams)
            known = self._views[slot] = self._view(payload)
        return known

    def _view(self, payload: memoryview) -> SlotViews:
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        data = whole[LENGTH_BYTES + self.header_capacity :]
        views = []
        for name, shape, dtype, _, _ in self.signature:
            begin, end = self.tensors[name].data_offsets
            views.append(data[begin:end].view(dtype).view(shape))
        return SlotViews(payload, whole.data_ptr(), views, [view.data_ptr() for view in views])

    def release_slots(self, streams: DeviceStreams) -> None:
        """Let go of the slots' memory."""
        for views in self._views.values():
            views.unpin(streams)
        self._views.clear()

    def routes(self, flat: FlatState, streams: DeviceStreams) -> Routes:
        """Made again when something has changed that they depend on."""
        addresses = [tensor.data_ptr() for tensor in flat.tensors.values()]
        known = self._routes
        if known is None or self.structure is None or not known.is_valid(addresses):  # strides may have changed
            known = self._routes = Routes(addresses)
            for index, tensor in enumerate(flat.tensors.values()):
                known.add(index, tensor, self.sizes[index], on_device=streams.owns(tensor))
        known.addresses = addresses
        return known


def signature_of(flat: FlatState) -> _Signature:
    """The facts that determine the layout of a shard."""
    blocks = flat.blocks
    return tuple(
        (name, tensor.shape, tensor.dtype, tensor.device, blocks.get(name)) for name, tensor in flat.tensors.items()
    )


def make_plan(
    signature: _Signature, structure: KeptStructure | None, tree_chars: int, *, sealed: bool = False
) -> CapturePlan:
    """Lay out a shard, with header space for a tree of twice `tree_chars`. Raises UnsupportedState if it cannot be one.
    `sealed`: with room for its manifest at the end, see `sealed_file`.

    Tensors with wide elements come first, so that each is aligned to its elements without gaps.
    """
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
    metadata = _metadata(signature, sealed=sealed)
    names = (sealed_file.SEAL_TENSOR + "'" * count for count in itertools.count())
    seal = next(name for name in names if name not in tensors)
    if sealed:
        tensors[seal] = TensorHeader("U8", (sealed_file.MAX_SEAL_BYTES,), (offset, offset + sealed_file.MAX_SEAL_BYTES))
    # Quotes in the tree are escaped in the header, and its numbers grow: leave room, so that the offsets stay.
    needed = len(shard_format.join_header(metadata, shard_format.encode_tensors(tensors))) + 2 * tree_chars + 1024
    pages = -(-(LENGTH_BYTES + needed) // _HEADER_STEP_BYTES)
    capacity = pages * _HEADER_STEP_BYTES - LENGTH_BYTES
    payload_bytes, seal_bytes = LENGTH_BYTES + capacity + offset, 0
    if sealed:
        seal_bytes = sealed_file.seal_bytes(payload_bytes)
        tensors[seal] = TensorHeader("U8", (seal_bytes,), (offset, offset + seal_bytes))
    tensors_json = shard_format.encode_tensors(tensors)
    if capacity > shard_format.MAX_HEADER_BYTES:
        raise UnsupportedState(
            f"The names and shapes of the state's {len(tensors)} tensors take {len(tensors_json)} bytes, everything "
            f"else {tree_chars} characters: more than the header of a safetensors file has room for.",
            hint="keep large data in tensors, and many small tensors in a few large ones",
        )
    if payload_bytes > manifests.MAX_PAYLOAD_BYTES:
        raise UnsupportedState(
            f"The state of this rank takes {readable_size(payload_bytes)}, and a shard has at most "
            f"{readable_size(manifests.MAX_PAYLOAD_BYTES)}.",
            hint="have more ranks share the state, so that each has less of it",
        )
    return CapturePlan(
        signature, structure, capacity, tensors, tensors_json, metadata, payload_bytes + seal_bytes, seal_bytes
    )


def _metadata(signature: _Signature, *, sealed: bool) -> dict[str, str]:
    metadata: dict[str, str] = {}
    if blocks := {name: block for name, _, _, _, block in signature if block is not None}:
        metadata[shard_format.SHARDING_KEY] = shard_format.encode_blocks(blocks)
    devices: dict[str, list[str]] = {}
    for name, _, _, device, _ in signature:
        if device.type != "cpu":
            devices.setdefault(str(device), []).append(name)
    if sealed and devices:
        metadata[DEVICES_KEY] = json.dumps(devices)
    return metadata
