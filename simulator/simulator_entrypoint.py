"""Google's fault-injection flags, on a running Flyball job: `python simulator/simulator_entrypoint.py --help`.

Run it on every node with its own --node_rank (or NODE_RANK). All draw the same faults from the seed, and the node whose
turn it is acts, so they need not talk to each other.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # run by its path: beside it is simulator/, not the folder that has it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from flyball.cli.inject.faults import Reach
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.messages import announce, print_error
from flyball.cli.signals import EndSignals
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import FlyballError, NotFound, UsageError
from simulator.inject.injector import FaultRequest

LOOK_INTERVAL_S = 0.1
XIDS = (48, 63, 79, 94, 95, 119)  # errors of memory, of the bus, and of the GPU's own processor
EXAMPLE = """Example, on every node of a job that runs with `flyball run --injectable`:
  python simulator/simulator_entrypoint.py --node_rank 0 --nnodes 2 --gpus_per_node 8 \\
    --fault_interval 60 --enable_gpu_failure --enable_gpu_slowdown
`flyball inject campaign` has more faults, and reports what became of each."""


class GpuTurn(NamedTuple):
    """What happens at the end of an interval."""

    node: int
    gpu: int  # of the node
    fault: str
    xid: int


def draw_turn(seed: int, number: int, *, nnodes: int, gpus_per_node: int, faults: Sequence[str]) -> GpuTurn:
    """The fault of an interval, the same on every node. Pure."""
    draw = random.Random(f"{seed}:{number}")
    return GpuTurn(draw.randrange(nnodes), draw.randrange(gpus_per_node), draw.choice(faults), draw.choice(XIDS))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Break GPUs of a running job again and again, drawn from a seed. Ctrl-C ends it and undoes what "
        "lasts.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    environ = os.environ
    made.add_argument("--node_rank", type=int, default=int(environ.get("NODE_RANK", "0")), help="number of this node")
    made.add_argument("--nnodes", type=int, default=1, help="nodes of the job (default: 1)")
    made.add_argument("--gpus_per_node", type=int, default=8, help="GPUs, so ranks, per node (default: 8)")
    made.add_argument("--fault_interval", type=float, default=10, help="seconds between faults (default: 10)")
    made.add_argument("--enable_gpu_failure", action="store_true", help="kill the process of a GPU")
    made.add_argument("--enable_gpu_slowdown", action="store_true", help="slow the process of a GPU down")
    made.add_argument("--gpu_slowdown_duration_s", type=float, default=30, help="for so many seconds (default: 30)")
    made.add_argument(
        "--enable_xid_failure",
        action="store_true",
        help="write an Xid into the kernel's log that the probes read (FLYBALL_PROBE_ROOT)",
    )
    made.add_argument("--seed", type=int, default=int(environ.get("SEED", "42")), help="draws the same faults again")
    made.add_argument("--job", default="", help="name of the job (default: the only one that runs)")
    made.add_argument("--supervisor", default="", help="its supervisor (default: FLYBALL_SUPERVISOR, or the one here)")
    made.add_argument("--token_file", default="", help="file with the supervisor's token")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        return _run(given)
    except FlyballError as error:
        print_error(error)
        return error.exit_code


def _run(given: argparse.Namespace) -> int:
    enabled = {
        "kill": given.enable_gpu_failure,
        "slow": given.enable_gpu_slowdown,
        "xid": given.enable_xid_failure,
    }
    faults = [fault for fault, is_enabled in enabled.items() if is_enabled]
    if not faults:
        raise UsageError(
            "No fault is enabled.", hint="--enable_gpu_failure, --enable_gpu_slowdown or --enable_xid_failure"
        )
    if min(given.nnodes, given.gpus_per_node) < 1 or given.fault_interval <= 0:
        raise UsageError("--nnodes, --gpus_per_node and --fault_interval must be positive.", hint="see --help")
    clock, idle, number = SystemClock(), threading.Event(), 0
    announce(f"seed {given.seed}")
    reach = Reach(SupervisorChoice(given.supervisor, given.token_file), None, None)
    with EndSignals(("SIGTERM", "SIGINT")) as signals, reach.open() as (client, injector):
        job = given.job or _only_job(client.items("/v1/jobs"))
        while True:
            number += 1
            due_s = clock.monotonic_s() + given.fault_interval
            while clock.monotonic_s() < due_s:
                if signals.count:
                    return signals.exit_code
                idle.wait(LOOK_INTERVAL_S)
            turn = draw_turn(given.seed, number, nnodes=given.nnodes, gpus_per_node=given.gpus_per_node, faults=faults)
            if turn.node != given.node_rank:
                continue
            try:
                rank = turn.node * given.gpus_per_node + turn.gpu
                placed = {int(r["rank"]): str(r["host_id"]) for r in client.get(f"/v1/jobs/{job}")["ranks"]}
                request = FaultRequest(turn.fault, job=job, rank=rank)
                if turn.fault == "xid":
                    request = FaultRequest("xid", host_id=placed.get(rank, ""), options={"xid": str(turn.xid)})
                elif turn.fault == "slow":
                    request = FaultRequest("slow", job=job, rank=rank, lasts_s=given.gpu_slowdown_duration_s)
                done = injector.inject(request)
                announce(f"{done.fault}: {done.target}")
                if done.not_recorded:
                    announce(f"warning: {done.not_recorded}")
            except FlyballError as error:
                announce(f"{turn.fault}: {error.message} Trying again after the interval.")


def _only_job(jobs: list[dict[str, object]]) -> str:
    running = [str(job["job"]) for job in jobs if not JobState(str(job["state"])).ended]
    if len(running) != 1:
        raise NotFound(f"{len(running)} jobs run: {', '.join(running) or 'none'}.", hint="name one with --job")
    return running[0]


if __name__ == "__main__":
    sys.exit(main())
