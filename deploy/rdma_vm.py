"""Run a command in virtual machines that have an RDMA device (Soft-RoCE): one, or two or three on one network.

    python deploy/rdma_vm.py -- .venv/bin/python -m pytest -m rdma tests/rdma
    python deploy/rdma_vm.py --vms 2 -- COMMAND                      in both; FLYBALL_VM is 0 or 1
    python deploy/rdma_vm.py --vms 3 --beside 'SHELL COMMAND' -- COMMAND   that one in vm1 and vm2, until COMMAND ends
                                                                     in vm0; a machine beside it may be lost

The guests' root is this host's, read-only, with a tmpfs over it: the repository and its environment are there as they
are, and nothing that a command writes reaches the host, except in /out (`--out`). Commands run as root in the
repository. FLYBALL_VM_ADDRESSES has the guests' addresses, comma-separated. Their RDMA device is rxe0, on eth0. With
`--nics 2` there is also eth1, on the same network, without an address.

At the end it says how busy this host was with other work: what was measured in a guest counts only if it was not. If a
guest's kernel panics inside rdma_rxe, it says so, and runs the command once more in new guests, but only once.
Exits with the command's code; 124 after the deadline. Where no guest can run, it says why and exits with 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from rdma_guest.image import Unavailable
from rdma_guest.machine import MOST_GUESTS, GuestFailed, Options, running

ROOT = Path(__file__).resolve().parents[1]
TIMED_OUT = 124
INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__, add_help=True)
    parser.add_argument("--vms", type=int, choices=range(1, MOST_GUESTS + 1), default=1)
    parser.add_argument("--beside", metavar="COMMAND", help="what all others run until the command has ended in vm0")
    parser.add_argument("--nics", type=int, choices=(1, 2), default=1, help="of each guest (%(default)s)")
    parser.add_argument("--memory-mib", type=int, default=2048, help="of each guest (%(default)s)")
    parser.add_argument("--cpus", type=int, default=1, help="of each guest (%(default)s)")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for the command, after booting (%(default)s)")
    parser.add_argument("--boot-deadline-s", type=float, default=180.0, help="(%(default)s)")
    parser.add_argument("--accel", choices=("kvm", "tcg"), default="", help="without: KVM where it works")
    parser.add_argument("--out", type=Path, help="a folder that the guests write as /out; without: a temporary one")
    parser.add_argument("command", nargs="+", help="a program and its arguments, after --")
    given = parser.parse_args()
    command = shlex.join(given.command)
    commands = [command] + [given.beside or command] * (given.vms - 1)
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        out = given.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flyball-vm-out-")))
        out.mkdir(parents=True, exist_ok=True)
        options = Options(
            repository=ROOT,
            cache=ROOT / ".venv" / ".rdma",
            out=out.resolve(),
            memory_mib=given.memory_mib,
            cpus=given.cpus,
            nics=given.nics,
            boot_deadline_s=given.boot_deadline_s,
            accelerator=given.accel,
        )
        return _run(commands, options, given.deadline_s, waits_for=1 if given.beside else given.vms)


def _run(commands: list[str], options: Options, deadline_s: float, *, waits_for: int) -> int:
    started, before_s = time.monotonic(), _others_s()
    try:
        codes = _exit_codes(commands, options, deadline_s, waits_for=waits_for)
    except Unavailable as error:
        print(f"skipped: {error}")
        return 0
    except GuestFailed as error:
        print(f"failed: {error}")
        return 1
    except TimeoutError as error:
        print(f"failed: {error}")
        return TIMED_OUT
    except KeyboardInterrupt:
        print("interrupted; the guests are ended")
        return INTERRUPTED
    said = ", ".join(f"{name}: exit code {code}" for name, code in codes.items())
    took_s = time.monotonic() - started
    share = (_others_s() - before_s) / (took_s * (os.cpu_count() or 1))
    print(f"{said} ({took_s:.0f} s; other work took {share:.0%} of this host's processors)")
    return next((code for code in codes.values() if code), 0)


def _exit_codes(commands: list[str], options: Options, deadline_s: float, *, waits_for: int) -> dict[str, int]:
    """By the guest's name. If a guest's kernel panics inside rdma_rxe, all of it is done once more, but only once."""
    is_repeated = False
    while True:
        with running(commands, options) as guests:
            waited_for = guests.all[:waits_for]
            failure: GuestFailed | TimeoutError | None = None
            try:
                guests.wait(waited_for, deadline_s)
            except (GuestFailed, TimeoutError) as error:
                failure = error
            codes = {guest.name: guest.exit_code or 0 for guest in waited_for}
            panics = {guest.name: where for guest in guests.all if (where := guest.panic_in_rxe())}
        if is_repeated or not panics or not (failure or any(codes.values())):
            if failure:
                raise failure
            return codes
        for name, where in panics.items():
            print(f"{name}: its kernel panicked in {where} of rdma_rxe, a bug of that kernel: once more", flush=True)
        is_repeated = True


def _others_s() -> float:
    """Processor seconds that this host has spent on anything but this process and its ended guests."""
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    busy_s = (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")
    return busy_s - sum(os.times()[:4])


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
