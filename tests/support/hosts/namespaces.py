"""Hosts with a network each: a namespace, an address, and a cable (a veth pair) to a switch that loses and delays.

The supervisor stays in this process's namespace, with one end of a cable of its own. All names carry this process's id,
the addresses are of the range for benchmarks (198.18.0.0/15), and nothing else of the machine's network is touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

SWITCH = Path(__file__).parent / "frame_switch.py"
SUPERVISOR = "supervisor"
INTERFACE = "eth0"  # of every host
MTU_BYTES = 9000
SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, _STSO, _SGSO: the switch hands on whole frames with their checksums


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


def why_not() -> str:
    """Why namespaces cannot be had here; '' if they can."""
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian: iproute2)"
    name = f"flyball-{os.getpid()}-try"
    cable = (f"fb{os.getpid()}x", f"fb{os.getpid()}y")
    try:
        ip("netns", "add", name)
        ip("link", "add", cable[0], "netns", name, "type", "veth", "peer", "name", cable[1], "netns", name)
        ip("netns", "exec", name, "true")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)
    return ""


class Network:
    """`host_ids` and the supervisor around one switch."""

    def __init__(self, *host_ids: str) -> None:
        if reason := why_not():
            pytest.skip(reason)
        self._prefix = f"flyball-{os.getpid()}"
        subnet = f"198.18.{os.getpid() % 250}"
        self._members = (SUPERVISOR, *host_ids)
        self.address = {name: f"{subnet}.{number}" for number, name in enumerate(self._members, 1)}
        self._port = {name: f"fb{os.getpid()}p{number}" for number, name in enumerate(self._members)}
        self._switch: subprocess.Popen[str] | None = None
        try:
            self._lay()
        except BaseException:
            self.end()
            raise

    def inside(self, name: str) -> tuple[str, ...]:
        """What is put before a command that is to run on a host."""
        return ("ip", "netns", "exec", f"{self._prefix}-{name}")

    def link(self, one: str, other: str, *, delay_s: float = 0.0, loss: float = 0.0, both_ways: bool = True) -> None:
        """From now on, of frames from `one` to `other`."""
        ends = [(one, other), (other, one)] if both_ways else [(one, other)]
        for source, target in ends:
            self._tell({"from": self._port[source], "to": self._port[target], "delay_s": delay_s, "loss": loss})

    def cable(self, name: str, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Of all frames from and to a host."""
        for other in self._members:
            if other != name:
                self.link(name, other, delay_s=delay_s, loss=loss)

    def pull(self, name: str) -> None:
        ip("-n", f"{self._prefix}-switch", "link", "set", self._port[name], "down")

    def plug(self, name: str) -> None:
        ip("-n", f"{self._prefix}-switch", "link", "set", self._port[name], "up")

    def passed_bytes(self, source: str, target: str) -> int:
        """How much has gone from one to the other."""
        return self._tell({})[f"{self._port[source]}>{self._port[target]}"]

    def end(self) -> None:
        if self._switch is not None:
            self._switch.communicate(timeout=60)
        for name in (*self._members[1:], "switch"):
            subprocess.run(["ip", "netns", "del", f"{self._prefix}-{name}"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._near_end(SUPERVISOR)], check=False, capture_output=True)

    def _lay(self) -> None:
        switch = f"{self._prefix}-switch"
        ip("netns", "add", switch)
        for name in self._members:
            near, far = self._near_end(name), self._port[name]
            ip("link", "add", near, "type", "veth", "peer", "name", far)
            for end in (near, far):
                _no_offloads(end)
                ip("link", "set", end, "mtu", str(MTU_BYTES))
            ip("link", "set", far, "netns", switch)
            ip("-n", switch, "link", "set", far, "up")
            if name == SUPERVISOR:
                self._bring_up(name, near)
            else:
                ip("netns", "add", f"{self._prefix}-{name}")
                ip("link", "set", near, "netns", f"{self._prefix}-{name}", "name", INTERFACE)
                self._bring_up(name, INTERFACE, "-n", f"{self._prefix}-{name}")
        self._switch = subprocess.Popen(
            [*self.inside("switch"), sys.executable, str(SWITCH), "7", *self._port.values()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tell({})

    def _near_end(self, name: str) -> str:
        return f"fb{os.getpid()}{'s' if name == SUPERVISOR else 'h'}"

    def _bring_up(self, name: str, end: str, *there: str) -> None:
        if there:
            ip(*there, "link", "set", "lo", "up")
        ip(*there, "address", "add", f"{self.address[name]}/24", "dev", end)
        ip(*there, "link", "set", end, "up")

    def _tell(self, what: dict[str, str | float]) -> dict[str, int]:
        assert self._switch is not None and self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(what) + "\n")
        self._switch.stdin.flush()
        passed: dict[str, int] = json.loads(self._switch.stdout.readline())
        return passed


def _no_offloads(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for offload in OFFLOADS:
            off = array("I", (offload, 0))
            fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP", interface.encode(), off.buffer_info()[0]))
