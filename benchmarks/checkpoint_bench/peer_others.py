"""DLRover's Flash Checkpoint, NVIDIA's resiliency extension, and torchsnapshot."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from checkpoint_bench.peer_adapters import Adapter, copy_into, flat_tensors
from checkpoint_bench.state import Training

_SAVE_TIMEOUT_S = 120.0
_POLL_S = 0.001


class DLRover(Adapter):
    """Its DdpCheckpointer with the saver process that it starts where `dlrover-run` is not the launcher."""

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
    """LocalCheckpointManager. Its state dict class asserts CUDA tensors, so this one clones CPU tensors instead, which
    is what its own would do on a GPU."""

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
                """They are where they belong."""

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
    """TorchAsyncCheckpoint: torch.save in a process."""

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
