"""examples/train_gpt.py as it is, at a steady pace, and with faults that a test arms while it runs.

A file `<fault>.rank<r>` in $ARMED_DIR arms a fault of one rank; the rank takes the file away before it obeys, so that
the fault does not come back after the restart that it causes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path

from torch import Tensor

from flyball.contracts import fault_points
from flyball.contracts.on_host import worker_env

ARMED = Path(os.environ["ARMED_DIR"])
PACE_S = float(os.environ["ARMED_PACE_S"])
RANK = os.environ["RANK"]


def spin() -> None:
    """Busy for ever, in Python: the process runs, the beacon stands still."""
    while True:
        pass


def absent() -> None:
    """Never enters the all-reduce; the other ranks wait for it in theirs."""
    threading.Event().wait()


def torn() -> None:
    """Die in the middle of the next capture."""
    os.environ[fault_points.VARIABLE] = "capture.half"
    fault_points.rearm()


def obey() -> None:
    for fault in (spin, absent, torn):
        armed = ARMED / f"{fault.__name__}.rank{RANK}"
        if armed.exists():
            armed.rename(armed.with_suffix(".taken"))
            fault()


def load_example() -> object:
    path = Path(__file__).parents[3] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    with (ARMED / "spawns.txt").open("a") as spawns:
        spawns.write(f"{os.environ[worker_env.GENERATION]} {RANK} {os.getpid()}\n")
    example = load_example()

    class ArmedLibrary(example.StandardLibrary):  # type: ignore[name-defined,misc]  # known at run time only
        def batch(self) -> tuple[Tensor, Tensor]:
            obey()
            threading.Event().wait(PACE_S)  # a step that takes its time without taking the processor's
            return super().batch()

    example.StandardLibrary = ArmedLibrary
    example.train(example.parse(sys.argv[1:]))


main()
