"""One ordinary pause of the training loop, which the first argument names. Used by ../false_alarms.py.

`PAUSE_SHARE` shortens all of them. None is declared with `job.phase`, and each ends by itself.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import flyball

SHARE = float(os.environ.get("PAUSE_SHARE", "1"))
STEP_S, AT, STEPS = 0.05, (60,), 140
AGAIN = (40, 80, 120)

# What runs beside a rank; {s} is how long.
ANSWERS_LATE = "import socket,time; s=socket.create_server(('127.0.0.1',0)); print(s.getsockname()[1],flush=True); \
c,_=s.accept(); time.sleep({s}); c.send(b'ok')"
TRICKLES = "import socket,time; s=socket.create_server(('127.0.0.1',0)); print(s.getsockname()[1],flush=True); \
c,_=s.accept(); [(c.send(b'x'*1000), time.sleep({s}/120)) for _ in range(120)]"
READS_LATE = "import sys,time; time.sleep({s}); sys.stdin.buffer.read()"
COMPUTES = "import time; t=time.time()\nwhile time.time()-t < {s}: pass"
HOLDS_A_LOCK = "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f,2); print(flush=True); time.sleep({s})"


def beside(code: str, seconds: float, *arguments: str, **pipes: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code.replace("{s}", str(seconds * SHARE)), *arguments]
    return subprocess.Popen(command, **pipes)


def rest(seconds: float) -> None:
    time.sleep(seconds * SHARE)


def evaluates_in_short_sleeps(rank: int) -> None:
    for _ in range(240):
        rest(1.0)


def evaluates(rank: int) -> None:
    rest(240.0)


def rank_0_evaluates(rank: int) -> None:
    if rank == 0:
        rest(200.0)
    dist.barrier()


def _fetch(code: str, seconds: float) -> None:
    with beside(code, seconds, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        with socket.create_connection(("127.0.0.1", int(server.stdout.readline()))) as connection:
            while connection.recv(4096):
                pass


def rank_0_downloads(rank: int) -> None:
    if rank == 0:
        _fetch(TRICKLES, 120.0)
    dist.barrier()


def a_service_answers_late_again_and_again(rank: int) -> None:
    if rank == 0:
        _fetch(ANSWERS_LATE, 45.0)


def the_store_stalls(rank: int) -> None:
    if rank == 0:
        with beside(READS_LATE, 100.0, stdin=subprocess.PIPE) as reader:
            assert reader.stdin is not None
            reader.stdin.write(b"x" * 4_000_000)


def a_child_compiles(rank: int) -> None:
    beside(COMPUTES, 90.0).wait()


def a_timer_sets_the_event(rank: int) -> None:
    event = threading.Event()
    threading.Timer(70.0 * SHARE, event.set).start()
    event.wait()


def a_thread_fills_the_queue(rank: int) -> None:
    filled: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: (rest(80.0), filled.put(1))).start()
    filled.get()


def another_process_holds_the_lock(rank: int) -> None:
    import fcntl

    name = f"lock{rank}"
    with beside(HOLDS_A_LOCK, 60.0, name, stdout=subprocess.PIPE) as holder, Path(name).open("w") as file:
        assert holder.stdout is not None
        holder.stdout.readline()
        fcntl.flock(file, fcntl.LOCK_EX)


def the_first_steps_are_slow(rank: int) -> None:
    rest(8.0)


PAUSES: dict[str, tuple[Callable[[int], None], tuple[int, ...]]] = {
    way.__name__: (way, AT)
    for way in (
        *(evaluates_in_short_sleeps, evaluates, rank_0_evaluates, rank_0_downloads, the_store_stalls),
        *(a_child_compiles, a_timer_sets_the_event, a_thread_fills_the_queue, another_process_holds_the_lock),
    )
} | {
    "a_service_answers_late_again_and_again": (a_service_answers_late_again_and_again, AGAIN),
    "the_first_steps_are_slow": (the_first_steps_are_slow, tuple(range(12))),
}


def main(way: str) -> None:
    pause, pauses_at = PAUSES[way]
    dist.init_process_group("gloo")
    job = flyball.attach()
    state = {"weights": torch.zeros(1000), "step": -1}
    for step in range(job.restore(state), STEPS):
        if step in pauses_at:
            pause(job.rank)
        dist.all_reduce(torch.ones(1))
        time.sleep(STEP_S)
        state["step"] = step
        job.step(step)
        job.save(step, state)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
