"""examples/train_gpt.py as it is, at a steady pace; every process notes its generation, rank and pid when it starts.

A step takes at least $TRUST_PACE_S. The notes go to $TRUST_FOLDER/spawns.txt, if that is set.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path

from torch import Tensor

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
PACE_S = float(os.environ.get("TRUST_PACE_S", "0"))


def load_example() -> object:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    if folder := os.environ.get("TRUST_FOLDER"):
        with (Path(folder) / "spawns.txt").open("a") as spawns:
            spawns.write(f"{os.environ['FLYBALL_GENERATION']} {os.environ['RANK']} {os.getpid()}\n")
    example = load_example()

    class SteadyLibrary(example.StandardLibrary):  # type: ignore[name-defined,misc]  # known at run time only
        def batch(self) -> tuple[Tensor, Tensor]:
            threading.Event().wait(PACE_S)  # a step that takes its time without taking the processor's
            return super().batch()

    example.StandardLibrary = SteadyLibrary
    example.train(example.parse(sys.argv[1:]))


main()
