"""`FlyballStager`: what `torch.distributed.checkpoint.async_save` takes as `async_stager`.

It copies the state into one piece of shared memory at the speed of a copy, while training waits, and never into one
that an earlier save still reads: with torch's own stager, a second save overwrites the first.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import AsyncStager

from ckpt_engine.trainer.capture.copy_threads import Extent, is_plain, process_threads
from ckpt_engine.trainer.capture.device_copies import CudaStreams, pin_memory, unpin_memory
from ckpt_engine.trainer.state import sharded_tensors
from ckpt_engine.trainer.state.state_tree import PLAIN_TENSORS
from flyball.contracts.errors import Conflict

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_log = logging.getLogger("flyball.engine")

_KEPT = 2  # buffers, in use or not
_ALIGNMENT = 64
_HEAD_BYTES = 4096  # before the tensors: a mark, and whether a save still reads them
_MARK = b"flyball-staged-1"
_IN_USE = len(_MARK)  # the byte behind it
_SHARED_MEMORY = "/dev/shm"  # where torch shares memory between processes


class FlyballStager(AsyncStager):
    """Make one, pass it to every `async_save`, and close it after the last.

    Two saves can be in progress with the memory of two copies of the state. Further ones take further memory. A buffer
    is used again once `FlyballWriter` has written what is in it, in this process or in that of `async_save`. Other
    writers do not say when they have: then each save takes new memory, as with torch's own.
    """

    _synchronize_after_execute = False  # `stage` has copied everything when it returns

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._is_closed = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in the host's memory. Raises Conflict after `close`."""
        if self._is_closed:
            raise Conflict("This stager is closed.", hint="make a new FlyballStager, or close it after the last save")
        walk = _Walk()
        walk.visit(state_dict)
        buffer = self._free_buffer(walk.size_bytes)
        memo = walk.copy_into(buffer)
        staged: dict[str, Any] = copy.deepcopy(state_dict, memo)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Let go of the memory, as soon as no save reads it any more."""
        self._is_closed = True
        self._buffers.clear()

    def _free_buffer(self, size_bytes: int) -> _Buffer:
        for buffer in self._buffers:
            if buffer.size_bytes == size_bytes and buffer.take():
                return buffer
        made = _Buffer(size_bytes)
        self._buffers = [*self._buffers, made][-_KEPT:]
        return made


class _Buffer:
    """Memory for one staged state."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.storage = _storage(_HEAD_BYTES + size_bytes)
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        self._is_pinned: bool | None = None  # None: not tried
        head = self._bytes[:_HEAD_BYTES].numpy()
        head[:_IN_USE] = list(_MARK)
        head[_IN_USE] = 1
        self._head = head

    def take(self) -> bool:
        """Use it again; False if a save still reads it."""
        if self._head[_IN_USE]:
            return False
        self._head[_IN_USE] = 1
        return True

    def pin(self, device: torch.device) -> None:
        """Let devices copy to it directly, until it is let go of."""
        if self._is_pinned is None:
            address = self._bytes.data_ptr()
            self._is_pinned = pin_memory(device, address, self._bytes.nbytes)
            if self._is_pinned:
                weakref.finalize(self, unpin_memory, address)  # a save may read it longer, but no device writes to it

    def view(self, begin: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one, contiguous, in the buffer."""
        first = _HEAD_BYTES + begin
        return self._bytes[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def release_staged(values: Iterable[object]) -> None:
    """Let the stager use the buffers of these tensors again, from whatever process: nobody reads them any more."""
    seen = set()
    for value in values:
        tensor = _local(value) if isinstance(value, torch.Tensor) else None
        if tensor is None or not tensor.is_cpu:
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in seen or storage.nbytes() <= _HEAD_BYTES:
            continue
        seen.add(address)
        head = (ctypes.c_ubyte * (_IN_USE + 1)).from_address(address)
        if bytes(head[:_IN_USE]) == _MARK:
            head[_IN_USE] = 0


def _storage(size_bytes: int) -> torch.UntypedStorage:
    """Memory that other processes can be given without a copy; private memory if there is not enough of that."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
        free_bytes = status.f_bavail * status.f_frsize
    except OSError:
        free_bytes = 0
    if size_bytes <= free_bytes:
        shared: torch.UntypedStorage = torch.UntypedStorage._new_shared(size_bytes, device="cpu")  # type: ignore[no-untyped-call]
        return shared
    _log.warning(
        "%s has %d bytes free: a state of %d bytes is staged in private memory, which costs one more copy where "
        "async_save runs in a process",
        _SHARED_MEMORY,
        free_bytes,
        size_bytes,
    )
    return torch.UntypedStorage(size_bytes)  # type: ignore[no-untyped-call]


class _Walk:
    """Finds the tensors of a state, and gives each a place in a buffer. Tensors that are the same memory get one."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._found: dict[int, torch.Tensor] = {}  # by id
        self._begins: dict[tuple[object, ...], int] = {}
        self._visited: set[int] = set()

    def visit(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._found:
                self._found[id(value)] = value
                local = _local(value)
                if local is not None and _key(local) not in self._begins:
                    self._begins[_key(local)] = self.size_bytes
                    self.size_bytes += -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT
        elif isinstance(value, Mapping | list | tuple) and id(value) not in self._visited:
            self._visited.add(id(value))
            for item in value.values() if isinstance(value, Mapping) else value:
                self.visit(item)

    def copy_into(self, buffer: _Buffer) -> dict[int, Any]:
        """Copy all of them. Returns the memo with which `copy.deepcopy` puts the copies into their places."""
        memo: dict[int, Any] = {}
        copies: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        others = StateDictStager(share_memory=True)  # of kinds that only torch knows how to copy
        for number, tensor in self._found.items():
            local = _local(tensor)
            if local is None:
                memo[number] = others.stage(tensor)
                continue
            view = buffer.view(self._begins[_key(local)], local)
            copies.setdefault(_key(local), (local, view))
            memo[number] = _sharded_like(tensor, view) if sharded_tensors.is_sharded(tensor) else view  # type: ignore[arg-type]
            if local.is_cuda:
                buffer.pin(local.device)
        _copy_all(list(copies.values()))
        return memo


def _sharded_like(tensor: DTensor, view: torch.Tensor) -> DTensor:
    """A sharded tensor whose block is `view`. Made of another one first: torch gives a sharded tensor the offset of its
    block, takes one with an offset for plain memory, and crashes when that is sent to another process."""
    with torch.no_grad():
        staged = sharded_tensors.like(tensor, view.new_empty(()).expand(view.shape))
    staged._local_tensor = view
    return staged


def _local(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's memory on this rank; None if it is of a kind that only torch knows how to copy."""
    if sharded_tensors.is_sharded(tensor):
        tensor = sharded_tensors.local_block(tensor)  # type: ignore[arg-type]
    known = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_quantized
    return tensor.detach() if known and not tensor.is_meta else None


def _key(local: torch.Tensor) -> tuple[object, ...]:
    return local.data_ptr(), local.device, local.dtype, local.shape, local.stride(), local.is_neg(), local.is_conj()


def _copy_all(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each first tensor into the second. When this returns, no first tensor is read any more."""
    plain: list[Extent] = []
    by_torch = []
    for source, target in copies:
        if source.nbytes and is_plain(source) and not source.is_conj():
            plain.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        elif source.nbytes:
            by_torch.append((source, target))
    streams = CudaStreams()
    streams.settle()
    with process_threads().copying(plain), torch.no_grad():
        for source, target in by_torch:
            # On a device: torch would change the sign on the host, before the bytes are there.
            target.copy_(source.resolve_neg().resolve_conj(), non_blocking=source.is_cuda)
    if any(source.is_cuda for source, _ in by_torch):
        streams.settle()
