"""A tensor's bytes, in place."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def bytes_in_place(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in place: they can be written to, and keep the tensor alive.

    Not `tensor.numpy()`: that marks the storage as not resizable for good, and sharding (FSDP) resizes storages.
    """
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise ValueError("not a contiguous tensor on the CPU")
    if not tensor.numel():
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")
