"""A data-parallel job whose generations hang, one after the other, each in its way: `benchmarks/hangs.py` runs it.

HANGS="lock:2 loop:0" lets rank 2 deadlock first, then rank 0 loop, then the job ends well. $HANGS_FOLDER/hung.txt has
the generation, the way and the time of each hang that has come.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import flyball
from flyball.contracts.clock import SystemClock

STEPS = 25  # of a generation before it hangs
STEP_S = 0.05
HUNG = Path(os.environ["HANGS_FOLDER"]) / "hung.txt"


class Batches(Dataset[torch.Tensor]):
    """Batches of which one never comes."""

    def __init__(self, count: int, missing: int, generation: int, way: str) -> None:
        self._count = count
        self._generation = generation
        self._missing = missing
        self._way = way

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._missing:
            note_hang(self._generation, self._way)
            os.kill(os.getpid(), signal.SIGSTOP) if self._way == "loader_stopped" else time.sleep(3_600.0)
        return torch.ones(8)


def deadlock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def take_two_locks() -> None:
    """Two threads take two locks in the wrong order."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(one: threading.Lock, other: threading.Lock) -> None:
        with one:
            both.wait()
            with other:
                pass

    threading.Thread(target=take, args=(first, second), daemon=True).start()
    take(second, first)


def join_a_thread() -> None:
    thread = threading.Thread(target=deadlock, daemon=True)
    thread.start()
    thread.join()


def fork_with_a_lock_held() -> None:
    """The child waits for a lock whose thread it does not have."""
    lock, is_held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        lock.acquire()
    os.waitpid(child, 0)


def compute_for_ever() -> None:
    total = 0
    while True:
        total += 1


def read_a_fifo() -> None:
    pipe = Path(os.environ["HANGS_FOLDER"]) / f"pipe.{os.getpid()}"
    os.mkfifo(pipe)
    pipe.read_text()  # nobody writes to it


def ask_one_that_never_answers() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as asked:
        asked.sendall(b"GET / HTTP/1.0\r\n\r\n")
        asked.recv(1)


def skip_the_collective() -> None:
    dist.barrier()  # while the others reduce


def wait_in_a_subgroup() -> None:
    """A barrier of two ranks that only one of them enters."""
    dist.barrier(group=SUBGROUPS[dist.get_rank()])


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


SUBGROUPS: dict[int, dist.ProcessGroup] = {}  # rank -> its group with the next one
WAYS: Mapping[str, Callable[[], object]] = {
    "lock": deadlock,
    "event": lambda: threading.Event().wait(),
    "queue": lambda: queue.Queue[int]().get(),
    "two_locks": take_two_locks,
    "join": join_a_thread,
    "stopped": stop,
    "process_event": lambda: multiprocessing.Event().wait(),
    "skipped": skip_the_collective,
    "subgroup": wait_in_a_subgroup,
    "fork": fork_with_a_lock_held,
    "child": lambda: subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"], check=False),
    "file": read_a_fifo,
    "pipe": lambda: os.read(os.pipe()[0], 1),
    "socket": ask_one_that_never_answers,
    "sleep": lambda: time.sleep(3_600.0),
    "c_sleep": lambda: ctypes.CDLL(None).sleep(3_600),
    "loop": compute_for_ever,
    "c_loop": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),  # holds the interpreter's lock
}


def note_hang(generation: int, way: str) -> None:
    with HUNG.open("a") as file:
        file.write(f"{generation} {way} {SystemClock().wall_s()}\n")


def batches(count: int, *, missing: int, generation: int, way: str) -> Iterator[torch.Tensor]:
    workers = 1 if missing >= 0 else 0
    yield from DataLoader(Batches(count, missing, generation, way), batch_size=None, num_workers=workers)


def main() -> None:
    job = flyball.attach()
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    for first in range(world_size):  # all make all groups
        group = dist.new_group([first, (first + 1) % world_size])
        SUBGROUPS[first] = group
    hangs = [hang.split(":") for hang in os.environ["HANGS"].split()]
    number = len(HUNG.read_text().splitlines()) if HUNG.exists() else 0  # no rank hangs before all have read this
    way, culprit = hangs[number] if number < len(hangs) else ("", -1)
    hangs_here = job.rank == int(culprit)
    state: dict[str, object] = {"step": -1}
    start = job.restore(state)
    missing = STEPS - 1 if way.startswith("loader") and hangs_here else -1
    for step, batch in enumerate(batches(STEPS + 1, missing=missing, generation=job.generation, way=way), start):
        if hangs_here and way in WAYS and step - start == STEPS - 1:
            note_hang(job.generation, way)
            WAYS[way]()
        time.sleep(STEP_S)
        dist.all_reduce(batch)
        state["step"] = step
        job.step(step)
        job.save(step, state)
    job.close()


if __name__ == "__main__":
    main()
