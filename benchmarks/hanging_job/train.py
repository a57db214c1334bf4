"""A data-parallel job whose generations hang, one after the other, each in its way: `benchmarks/hangs.py` runs it.

HANGS="lock:2 loop:0" lets rank 2 deadlock first, then rank 0 loop, then the job ends well. $HANGS_FOLDER/hung.txt has
the generation and the way of each hang that has come.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import flyball

STEPS = 6  # of a generation before it hangs
HUNG = Path(os.environ["HANGS_FOLDER"]) / "hung.txt"


class Batches(Dataset[torch.Tensor]):
    """Batches of which one never comes."""

    def __init__(self, count: int, missing: int, generation: int) -> None:
        self._count = count
        self._generation = generation
        self._missing = missing

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._missing:
            note_hang(self._generation, "data_loader")
            fetch_from_the_store()
        return torch.ones(8)


def fetch_from_the_store() -> None:
    time.sleep(3_600.0)


def deadlock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def compute_for_ever() -> None:
    total = 0
    while True:
        total += 1


def read_the_pipe() -> None:
    pipe = Path(os.environ["HANGS_FOLDER"]) / f"pipe.{os.getpid()}"
    os.mkfifo(pipe)
    pipe.read_text()  # nobody writes to it


def skip_the_collective() -> None:
    dist.barrier()  # while the others reduce


def note_hang(generation: int, way: str) -> None:
    with HUNG.open("a") as file:
        file.write(f"{generation} {way}\n")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


WAYS = {
    "lock": deadlock,
    "loop": compute_for_ever,
    "file": read_the_pipe,
    "skipped": skip_the_collective,
    "stopped": stop,
}


def batches(count: int, *, missing: int, generation: int) -> Iterator[torch.Tensor]:
    workers = 1 if missing >= 0 else 0
    yield from DataLoader(Batches(count, missing, generation), batch_size=None, num_workers=workers)


def main() -> None:
    job = flyball.attach()
    dist.init_process_group("gloo")
    hangs = [hang.split(":") for hang in os.environ["HANGS"].split()]
    number = len(HUNG.read_text().splitlines()) if HUNG.exists() else 0  # no rank hangs before all have read this
    way, culprit = hangs[number] if number < len(hangs) else ("", -1)
    hangs_here = job.rank == int(culprit)
    state: dict[str, object] = {"step": -1}
    start = job.restore(state)
    missing = STEPS - 1 if way == "data_loader" and hangs_here else -1
    for step, batch in enumerate(batches(STEPS + 1, missing=missing, generation=job.generation), start):
        if hangs_here and way in WAYS and step - start == STEPS - 1:
            note_hang(job.generation, way)
            WAYS[way]()
        dist.all_reduce(batch)
        state["step"] = step
        job.step(step)
        job.save(step, state)
    job.close()


if __name__ == "__main__":
    main()
