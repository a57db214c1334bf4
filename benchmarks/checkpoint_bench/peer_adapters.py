"""Adapters of the other engines: torch, safetensors, DCP, DLRover, NVIDIA's extension, torchsnapshot."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpoint_bench.state import Training

_SAVE_TIMEOUT_S = 120.0
_POLL_S = 0.001


class Adapter:
    """One engine. `save` returns when training may continue, `finish` when the files of the save are complete, and
    `load` when the state's tensors have it."""

    note = ""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the folder of this step's files, and of nothing else."""
        return self.folder / f"step{step}"

    def save(self, step: int) -> None:
        raise NotImplementedError

    def finish(self, step: int) -> None:
        """Does nothing by default, for engines whose `save` writes."""

    def load(self, step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Stop the engine's own processes."""


def flat_tensors(training: Training) -> dict[str, torch.Tensor]:
    """Return the state's tensors by name, contiguous and untied, for engines that take a flat dict."""
    found = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for index, moments in training.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
    return found


def copy_into(target: object, source: object) -> None:
    """Copy every tensor of one state dict into its counterpart in another."""
    if isinstance(target, torch.Tensor):
        assert isinstance(source, torch.Tensor)
        with torch.no_grad():
            target.copy_(source)
    elif isinstance(target, dict):
        assert isinstance(source, dict)
        for key, item in target.items():
            copy_into(item, source[key])
    elif isinstance(target, list | tuple):
        assert isinstance(source, list | tuple)
        for item, other in zip(target, source, strict=True):
            copy_into(item, other)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Run with a process group of one, for engines that need one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


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
        self._storages = [
            t.untyped_storage() for t in self.state.values()
        ]  # a stager finds its buffers by these storages

    def save(self, step: int) -> None:
        dcp.save(dict(self.state), checkpoint_id=self.path(step))

    def load(self, step: int) -> None:
        dcp.load(dict(self.state), checkpoint_id=self.path(step))


class DcpAsync(DcpSave):
    """`stager`: None for the one that async_save creates for each save."""

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
    """Make an adapter. `kind`: thread or process. `staging`: default, reused, shared or pinned."""
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


class DLRover(Adapter):
    """DLRover's DdpCheckpointer, with the saver process that it starts if `dlrover-run` is not the launcher."""

    note = "no verification; one buffer; no fsync of its own; its restore from memory aliases the buffer"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        os.environ["TORCHELASTIC_RUN_ID"] = f"flyball-benchmark-{os.getpid()}"  # names its shared memory
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._disk = StorageType.DISK
        self._checkpointer: Any = DdpCheckpointer(str(folder))

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, step: int) -> None:
        self._checkpointer.save_checkpoint(step, self.training.state_dict, storage_type=self._disk)

    def finish(self, step: int) -> None:
        tracker = self.folder / "dlrover_latest.txt"
        deadline_s = time.monotonic() + _SAVE_TIMEOUT_S
        while not (tracker.exists() and tracker.read_text(encoding="ascii").strip() == str(step)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"step {step} did not become DLRover's latest within {_SAVE_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def load(self, step: int) -> None:
        loaded = torch.load(self.path(step) / "rank_0.pt", weights_only=False)  # it saves its own configuration class
        copy_into(self.training.state_dict, loaded.get("model_states", loaded))

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine._shm_handler.unlink()
        engine.close()
        if engine.saver_proc is not None:
            engine.saver_proc.terminate()
            engine.saver_proc.join(10)


class NvidiaLocal(Adapter):
    """LocalCheckpointManager. Its state dict class asserts CUDA tensors. This one clones CPU tensors instead, as the
    original does on a GPU."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        class CpuState(BasicTensorAwareStateDict):
            def __init__(self, state_dict: dict[str, torch.Tensor]) -> None:
                self.state_dict = state_dict
                self._is_hollow = False

            def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
                self.state_dict = {name: tensor.clone() for name, tensor in self.state_dict.items()}

            def restore_tensor_device(self, non_blocking: bool = True) -> None:
                """Do nothing: the tensors are already on the right device."""

        self._state = CpuState
        globals()["CpuState"] = CpuState  # it is pickled by name
        CpuState.__qualname__ = "CpuState"
        self._manager: Any = LocalCheckpointManager(folder)
        self.note = "no verification; no fsync of its own; CPU subclass of its state dict; saves synchronously"
        try:
            torch.cuda.synchronize()
        except (AssertionError, RuntimeError) as error:
            self.note += f": is_async=True calls torch.cuda.synchronize ({type(error).__name__}: {error})"

    def path(self, step: int) -> Path:
        return Path(self._manager.local_ckpt_dir)

    def save(self, step: int) -> None:
        self._manager.save(self._state(dict(flat_tensors(self.training))), step, is_async=False)

    def load(self, step: int) -> None:
        if self._manager.find_latest() != step:
            raise RuntimeError(f"its latest is {self._manager.find_latest()}, not {step}")
        loaded, _ = self._manager.load()
        copy_into(flat_tensors(self.training), loaded.state_dict)


class NvidiaAsync(Adapter):
    """TorchAsyncCheckpoint: torch.save in a separate process."""

    note = "no verification; no fsync of its own"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self._checkpoint: Any = TorchAsyncCheckpoint()

    def save(self, step: int) -> None:
        self.path(step).mkdir()
        self._checkpoint.async_save(self.training.state_dict, self.path(step) / "state.pt")

    def finish(self, step: int) -> None:
        self._checkpoint.finalize_async_save(blocking=True)

    def load(self, step: int) -> None:
        copy_into(self.training.state_dict, torch.load(self.path(step) / "state.pt", weights_only=True))

    def close(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True, terminate=True)


class TorchSnapshot(Adapter):
    note = "async_take; no verification; no fsync of its own"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        import torchsnapshot

        self._module: Any = torchsnapshot
        self._pending: Any = None

    def save(self, step: int) -> None:
        self._pending = self._module.Snapshot.async_take(str(self.path(step)), self.training.state)

    def finish(self, step: int) -> None:
        self._pending.wait()

    def load(self, step: int) -> None:
        self._module.Snapshot(str(self.path(step))).restore(self.training.state)
