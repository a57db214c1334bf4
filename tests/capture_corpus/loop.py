"""What a way of the corpus is made of: a loop that trains, and what it writes to its state when `save` has returned."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROWS, COLUMNS = 2048, 1024  # 8 MiB: a copy takes milliseconds
LAST_ROWS = slice(ROWS - 72, ROWS - 8)  # a part that a copy reaches late


@dataclass
class Loop:
    """`step` trains. `after_save` is called as soon as `save` has returned. Threads and processes of the script that
    write at any time hold `lock` while they do: a write during the call is the script's own race."""

    state: dict[str, Any]
    step: Callable[[], object]
    after_save: Callable[[], object] = lambda: None
    lock: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)


def matrix(rows: int = ROWS) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, COLUMNS) * 0.01)


def stepping(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Callable[[], object]:
    """A step of this optimizer with gradients of its own."""

    def step() -> None:
        for p in parameters:
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()

    return step


def sgd(parameters: Sequence[torch.Tensor]) -> Callable[[], object]:
    return stepping(torch.optim.SGD(parameters, lr=1e-3, momentum=0.9), parameters)


def writing(write: Callable[[], object]) -> AbstractContextManager[Any]:
    """Have a thread write all the time; returns its lock."""
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                write()
            time.sleep(0.001)

    threading.Thread(target=run, daemon=True).start()
    return lock


def compiled_c(source: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "kernel.c"
        file.write_text(source)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", f"{name}/kernel.so", str(file)], check=True)
        return ctypes.CDLL(f"{name}/kernel.so")
