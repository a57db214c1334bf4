"""A second RDMA device on each of two virtual machines: rxe1 on eth1. Shards can go over it while TCP uses eth0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from other_host import OtherMachine

NIC, DEVICE = "eth1", "rxe1"
HAS_ADDRESS = f"grep -qs ^0000:0000:0000:0000:0000:ffff: /sys/class/infiniband/{DEVICE}/ports/1/gids/*"
ADD = f"""
ip addr add {{address}}/24 dev {NIC}
rdma link add {DEVICE} type rxe netdev {NIC}
until {HAS_ADDRESS}; do sleep 0.1; done
"""
# A device of Soft-RoCE stays until nobody has it open any more, and the command waits for that.
REMOVE = f"timeout 30 rdma link delete {DEVICE}; ip addr flush dev {NIC}; ip link set {NIC} up"


@dataclass
class Machine:
    """`host` starts processes there that end before the device does."""

    host: OtherMachine
    second_address: str

    def link(self, state: str) -> None:
        """The port is `up`, with its address, or `down`."""
        self.host.run("ip", "link", "set", NIC, state)
        if state == "up":
            self.host.run("sh", "-c", f"until {HAS_ADDRESS}; do sleep 0.1; done")

    def packets(self, device: str) -> int:
        folder = f"/sys/class/infiniband/{device}/ports/1/hw_counters"
        return sum(int(line) for line in self.host.run("cat", f"{folder}/sent_pkts", f"{folder}/rcvd_pkts").split())


@contextmanager
def two_devices() -> Iterator[tuple[Machine, Machine]]:
    """This machine and the other one."""
    with ExitStack() as stack:
        machines = []
        for number, find in enumerate((OtherMachine.of_one_host, OtherMachine.of_this_run)):
            outer = stack.enter_context(find())
            address = f"10.77.0.{11 + number}"
            stack.callback(outer.run, "sh", "-c", REMOVE)
            outer.run("sh", "-ec", ADD.format(address=address))
            machines.append(Machine(stack.enter_context(find()), address))
        yield machines[0], machines[1]
