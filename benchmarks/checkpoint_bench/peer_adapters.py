"""How another engine is asked to save and to load; one subclass for each, in the `peer_*.py` beside this."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from checkpoint_bench.state import Training


class Adapter:
    """One engine. `save` returns when training may go on, `finish` when what was saved is complete in its files, and
    `load` when it is in the tensors of the state."""

    note = ""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where this step's files are; nothing else is below it."""
        return self.folder / f"step{step}"

    def save(self, step: int) -> None:
        raise NotImplementedError

    def finish(self, step: int) -> None:
        """Nothing to wait for if `save` writes."""

    def load(self, step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End what it started."""


def flat_tensors(training: Training) -> dict[str, torch.Tensor]:
    """The state's tensors by name, contiguous and untied, for engines that take a flat dict."""
    found = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for index, moments in training.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
    return found


def copy_into(target: object, source: object) -> None:
    """Every tensor of one state dict into its counterpart in another."""
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
    """A group of one process, for engines that want one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
