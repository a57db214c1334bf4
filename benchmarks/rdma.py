"""How fast slots go over RDMA, beside Debian's perftest on the same device, and what it costs beside TCP.

    make bench-rdma                                                        in a virtual machine, less than 5 minutes
    python deploy/rdma_vm.py -- .venv/bin/python benchmarks/rdma.py --mib 64 --rounds 5

Rounds are interleaved, and the median counts: WRITE as a replica is sent (announced, written, taken back), READ as a
shard is restored, `ib_write_bw` and `ib_read_bw` with messages as long as the slot, and both over TCP on loopback.
perftest says what it moved per second without its start; a transfer of ours is timed from the request to its last
byte. Processor time is that of the whole machine, so that the kernel's part is in it. On Soft-RoCE the processor does
the work of the NIC: what is measured there is that the engine adds little to what the device can do, and not what a NIC
does.

Prints a table, and then one line of JSON. How busy the machine under the virtual one was, deploy/rdma_vm.py says at the
end: a run counts only if nothing else ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_engine.contracts.peer_wire import Ping, Reply, ShardVerdict
from ckpt_engine.peers.transport.port import ByteCounters, Connection
from ckpt_engine.peers.transport.rdma.nics import Nics
from ckpt_engine.peers.transport.rdma.verbs import active_ports
from ckpt_engine.peers.transport.tcp import TcpListener, connect_tcp

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other side is the tests'
from tests.rdma import rdma_transport, slot_peer

MIB = 1 << 20
START_DEADLINE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="per slot (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", choices=("rdma", "tcp"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    size_bytes = given.mib * MIB
    if given.peer:
        serve(given.peer, size_bytes)
        return
    began = time.monotonic()
    found = Measured(size_bytes)
    slot = slot_peer.Slot("own", size_bytes)
    slot.fill()
    nics = Nics(slot_peer.PATIENT, ByteCounters())
    pinned_before = pinned_bytes()
    with peer("rdma", size_bytes, nics) as rdma, peer("tcp", size_bytes, nics) as tcp:
        moves: dict[str, Callable[[], None]] = {
            "rdma write": lambda: put(rdma, slot),
            "rdma read": lambda: fetch(rdma, slot),
            "tcp put": lambda: put(tcp, slot),
            "tcp fetch": lambda: fetch(tcp, slot),
        }
        for move in moves.values():
            move()  # registers the slots, and warms up
        found.registered = {"slots_bytes": nics.registered_bytes, "pinned_bytes": pinned_bytes() - pinned_before}
        for _ in range(given.rounds):
            for name, move in moves.items():
                found.time(name, move)
            for tool in ("ib_write_bw", "ib_read_bw"):
                found.seconds[tool].append(size_bytes / perftest(tool, size_bytes))
    slot.close()
    nics.close()
    found.report(time.monotonic() - began)


class Measured:
    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._busy: dict[str, list[float]] = defaultdict(list)
        self.registered: dict[str, int] = {}
        self._load_before = os.getloadavg()[0]

    def time(self, name: str, move: Callable[[], None]) -> None:
        began, before = time.monotonic(), busy_s()
        move()
        self.seconds[name].append(time.monotonic() - began)
        self._busy[name].append(busy_s() - before)

    def report(self, took_s: float) -> None:
        size_bytes = self._size_bytes
        speed = {name: size_bytes / MIB / statistics.median(taken) for name, taken in self.seconds.items()}
        spread = {name: sorted(size_bytes / MIB / one for one in taken) for name, taken in self.seconds.items()}
        cost = {name: statistics.median(taken) * (1 << 30) / size_bytes for name, taken in self._busy.items()}
        ratios = {
            "write": speed["rdma write"] / speed["ib_write_bw"],
            "read": speed["rdma read"] / speed["ib_read_bw"],
        }
        print(f"{'':12} {'MiB/s':>8}  {'slowest to fastest':>20}  processor s/GiB")
        for name, mib_per_s in speed.items():
            range_of = f"{spread[name][0]:.1f} to {spread[name][-1]:.1f}"
            print(f"{name:12} {mib_per_s:8.1f}  {range_of:>20}  " + (f"{cost[name]:.1f}" if name in cost else ""))
        print(f"of perftest: WRITE {ratios['write']:.2f}, READ {ratios['read']:.2f}", flush=True)
        facts = {
            "slot_bytes": size_bytes,
            "mib_per_s": speed,
            "mib_per_s_of_each_round": spread,
            "cpu_s_per_gib": cost,
            "of_perftest": ratios,
            "registered": self.registered,
            "load_before": self._load_before,
            "took_s": round(took_s),
        }
        print(json.dumps(facts))


def put(connection: Connection, slot: slot_peer.Slot) -> None:
    """Send the slot as a replica."""
    assert connection.request(Ping(), Reply, timeout_s=60).verdict is ShardVerdict.SEND
    slot_peer.give(connection, slot)
    assert connection.receive(Reply, timeout_s=120).verdict is ShardVerdict.OK


def fetch(connection: Connection, slot: slot_peer.Slot) -> None:
    connection.send(slot_peer.LIST, timeout_s=60)
    slot_peer.restore(connection, slot)


@contextmanager
def peer(kind: str, size_bytes: int, nics: Nics) -> Iterator[Connection]:
    command = [sys.executable, __file__, "--peer", kind, "--mib", str(size_bytes // MIB)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{process.stdout.readline().split()[1]}"
        if kind == "rdma":
            connection: Connection = rdma_transport.connect(address, slot_peer.PATIENT, nics=nics)
        else:
            connection = connect_tcp(address, settings=slot_peer.PATIENT, total=ByteCounters())
        with connection:
            yield connection
    finally:
        process.kill()
        process.wait()


def serve(kind: str, size_bytes: int) -> None:
    if kind == "rdma":
        listener = rdma_transport.RdmaListener("127.0.0.1", 0, fallback=False, settings=slot_peer.PATIENT)
    else:
        listener = TcpListener("127.0.0.1", 0, fallback=False, settings=slot_peer.PATIENT, total=ByteCounters())
    slot_peer.serve(listener, size_bytes, digests=False)


def perftest(tool: str, size_bytes: int) -> float:
    """Bytes per second of a bandwidth test by Debian's perftest between two processes on this device."""
    (port,) = active_ports()
    assert port.gid is not None
    device = ["-d", port.device, "-i", str(port.number), "-x", str(port.gid.index)]
    # Two messages at a time, so that there is no pause between them; no run is shorter than five.
    command = [tool, *device, "-s", str(size_bytes), "-t", "2", "-n", "5", "-F", "-p", "18600"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            done = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, check=False, timeout=300)
            found = re.search(rf"^\s*{size_bytes}\s+\d+\s+[\d.]+\s+([\d.]+)", done.stdout, re.MULTILINE)
            if found is not None:
                return float(found[1]) * MIB
            assert time.monotonic() < deadline, f"{command}: {done.stdout}{done.stderr}"
            assert server.poll() is None, f"{command}: {server.communicate()[0]}"
            time.sleep(0.2)  # it does not listen yet
    finally:
        server.kill()
        server.wait()


def pinned_bytes() -> int:
    """What this process has pinned for devices."""
    (kib,) = re.findall(r"^VmPin:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) << 10


def busy_s() -> float:
    """Processor seconds that this machine has spent on anything."""
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
