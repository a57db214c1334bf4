"""What comes with torch: torch.save, torch.distributed.checkpoint; and safetensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpoint_bench.peer_adapters import Adapter, copy_into, flat_tensors
from checkpoint_bench.state import Training

_SAVE_TIMEOUT_S = 120.0


class TorchSave(Adapter):
    note = "no verification; no fsync of its own"

    def save(self, step: int) -> None:
        self.path(step).mkdir()
        torch.save(self.training.state_dict, self.path(step) / "state.pt")

    def load(self, step: int) -> None:
        copy_into(self.training.state_dict, torch.load(self.path(step) / "state.pt", weights_only=True))


class Safetensors(Adapter):
    note = "no verification; no fsync of its own; tensors only"

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        self.path(step).mkdir()
        save_file(flat_tensors(self.training), self.path(step) / "state.safetensors")

    def load(self, step: int) -> None:
        from safetensors import safe_open

        with safe_open(self.path(step) / "state.safetensors", "pt") as file, torch.no_grad():
            for name, tensor in flat_tensors(self.training).items():
                tensor.copy_(file.get_tensor(name))


class DcpSave(Adapter):
    note = "no verification"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.state = flat_tensors(training)
        self._storages = [t.untyped_storage() for t in self.state.values()]  # a stager finds its buffers by these

    def save(self, step: int) -> None:
        dcp.save(dict(self.state), checkpoint_id=self.path(step))

    def load(self, step: int) -> None:
        dcp.load(dict(self.state), checkpoint_id=self.path(step))


class DcpAsync(DcpSave):
    """`stager`: None for what async_save makes by itself, for each save anew."""

    def __init__(self, training: Training, folder: Path, kind: AsyncCheckpointerType, stager: Any, note: str) -> None:  # noqa: ANN401
        super().__init__(training, folder)
        self._kind = kind
        self._stager = stager
        self._response: Any = None
        self.note = f"no verification; {note}"

    def save(self, step: int) -> None:
        given = {} if self._stager is None else {"async_stager": self._stager}
        self._response = dcp.async_save(
            dict(self.state),
            checkpoint_id=self.path(step),
            async_checkpointer_type=self._kind,
            **given,
        )

    def finish(self, step: int) -> None:
        future = getattr(self._response, "upload_completion", self._response)
        future.result(timeout=_SAVE_TIMEOUT_S)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def dcp_async(training: Training, folder: Path, kind: str, staging: str) -> DcpAsync:
    """`kind`: thread or process. `staging`: default, reused, shared or pinned."""
    if staging == "default":
        return DcpAsync(training, folder, AsyncCheckpointerType(kind), None, "its default stager, made for each save")
    options = StagingOptions(
        use_pinned_memory=staging == "pinned",
        use_shared_memory=kind == "process",
        use_async_staging=False,  # it needs an accelerator, and so does the non-blocking copy
        use_non_blocking_copy=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stager = DefaultStager(options)
    note = f"DefaultStager, {staging}, one for all saves"
    note += "".join(f"; it warns: {str(warning.message).split('.')[0]}" for warning in caught)
    return DcpAsync(training, folder, AsyncCheckpointerType(kind), stager, note)
