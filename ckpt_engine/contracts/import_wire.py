"""What `flyball ckpt import` and its subprocess tell each other: one request, then lines of JSON. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from flyball.contracts.identity import JobName, Step

MEGATRON_MODEL, MEGATRON_OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"  # in a rank's folder


class ForeignFormat(StrEnum):
    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    MEGATRON = "megatron"


class ImportRequest(msgspec.Struct, frozen=True):
    """Make the shards of one step, in `folder`, from a checkpoint of another library.

    `sources`: a folder (dcp), the file of each rank (torch), the folder of each rank (megatron), or the files of one
    state (safetensors). `entry`: the name that a bare state_dict gets.
    """

    format: ForeignFormat
    sources: tuple[str, ...]
    folder: str
    job: JobName
    step: Step
    entry: str
    limit_bytes: Annotated[int, msgspec.Meta(ge=0)]  # of address space, beyond what Python and torch take


class ImportProgress(msgspec.Struct, frozen=True, tag="progress"):
    written_bytes: int


class ImportDone(msgspec.Struct, frozen=True, tag="done"):
    """`entries` of rank 0's state."""

    tensors: int
    entries: tuple[str, ...]


class ImportFailed(msgspec.Struct, frozen=True, tag="failed"):
    message: str
    hint: str
    code: str


ImportNews = ImportProgress | ImportDone | ImportFailed
