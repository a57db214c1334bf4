"""The live stack without a fault, while others want its processors, its disk and its network."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from trust_bench.chaos import CHECKPOINT, HOSTS, NNODES, PACE_S
from trust_bench.interruption import Interruption
from trust_bench.stack import MARK, TrustStack

ORDINARY = ("start_job", "complete_job")
LOOK_S = 1.0
PROCESSOR = "while True: pass"
DISK = """
import os, sys
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
"""
NETWORK = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 0))
def send():
    with socket.create_connection(listener.getsockname()) as sender:
        while True:
            sender.sendall(bytes(1 << 16))
threading.Thread(target=send, daemon=True).start()
receiver, _ = listener.accept()
while receiver.recv(1 << 16):
    pass
"""


class Quiet(msgspec.Struct, frozen=True):
    seconds: float
    steps: int
    noise: tuple[str, ...]
    incidents: tuple[str, ...]
    decisions: tuple[str, ...]  # without the start of the job


def run_quiet(*, duration_s: float, announce: Callable[[str], None], interruption: Interruption) -> Quiet:
    """Raises StackError, and FlyballError if the job cannot be started."""
    with TrustStack(HOSTS, interruption) as stack, ExitStack() as noises:
        stack.submit(nnodes=NNODES, pace_s=PACE_S, checkpoint={**CHECKPOINT, "persistent_every_steps": 0})
        noise = {f"processor {number}": [PROCESSOR] for number in range(len(os.sched_getaffinity(0)))}
        noise |= {"disk": [DISK, str(stack.root / "noise")], "network": [NETWORK]}
        for words in noise.values():
            process = subprocess.Popen([sys.executable, "-c", *words], env={**os.environ, MARK: str(stack.root)})
            noises.callback(process.wait, 60.0)
            noises.callback(process.kill)
        announce(f"noise: {', '.join(noise)}; {duration_s:.0f} s")
        began_s = time.monotonic()
        with interruption.in_order():
            while time.monotonic() < began_s + duration_s and not interruption.is_asked:
                time.sleep(LOOK_S)
        incidents = stack.api.everything("/v1/incidents")
        decisions = stack.api.everything("/v1/decisions")
        steps = int(stack.api.get("/v1/jobs/trust")["newest_step"])
    return Quiet(
        seconds=time.monotonic() - began_s,
        steps=steps,
        noise=tuple(noise),
        incidents=tuple(f"{one['cause']}: {one['message']}" for one in incidents),
        decisions=tuple(f"{one['kind']}: {one['reason']}" for one in decisions if one["kind"] not in ORDINARY),
    )
