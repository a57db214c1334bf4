"""A network of its own for every host of the stack: namespaces on cables to a router, which is a namespace too.

It needs the command `ip` and CAP_SYS_ADMIN; `why_not` says what is missing. Nothing of the machine's own network is
changed but one interface, which leads to the router.
"""

from __future__ import annotations

import os
import shutil
import subprocess

INTERFACE = "eth0"  # of every host


def why_not() -> str:
    """Why hosts cannot have networks of their own here; '' if they can."""
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian: iproute2)"
    name = f"fbt{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    finally:
        _delete("netns", name)
    return ""


class Network:
    """`host_ids` around one router; the supervisor's services are outside, at `outside`."""

    def __init__(self, *host_ids: str) -> None:
        self._own = f"fbt{os.getpid()}"
        self._router = f"{self._own}-router"
        subnet = f"198.19.{os.getpid() % 250}"
        self.outside = f"{subnet}.1"
        self.address = {host: f"{subnet}.{4 * number + 1}" for number, host in enumerate(host_ids, 1)}
        try:
            self._lay(subnet)
        except BaseException:
            self.end()
            raise

    def inside(self, host_id: str) -> tuple[str, ...]:
        """What is put before a command that is to run on a host."""
        return ("ip", "netns", "exec", self._name(host_id))

    def end(self) -> None:
        for name in (*map(self._name, self.address), self._router):
            _delete("netns", name)
        _delete("link", self._own)

    def _name(self, host_id: str) -> str:
        return f"{self._own}-{host_id}"

    def _lay(self, subnet: str) -> None:
        _ip("netns", "add", self._router)
        _ip("netns", "exec", self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        _ip("link", "add", self._own, "type", "veth", "peer", "name", "outside", "netns", self._router)
        _ip("address", "add", f"{self.outside}/30", "dev", self._own)
        _ip("link", "set", self._own, "up")
        _ip("-n", self._router, "address", "add", f"{subnet}.2/30", "dev", "outside")
        _ip("-n", self._router, "link", "set", "outside", "up")
        for number, (host_id, address) in enumerate(self.address.items(), 1):
            name, gate = self._name(host_id), f"{subnet}.{4 * number + 2}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", host_id, "netns", self._router)
            _ip("-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", self._router, "address", "add", f"{gate}/30", "dev", host_id)
            _ip("-n", self._router, "link", "set", host_id, "up")
            _ip("-n", name, "route", "add", "default", "via", gate)
        _ip("route", "add", f"{subnet}.0/24", "via", f"{subnet}.2")


def _delete(what: str, name: str) -> None:
    """In a session of its own: a terminal sends Ctrl-C to whatever runs in this one."""
    command = ["ip", what, "del", name]
    subprocess.run(command, check=False, capture_output=True, timeout=60, start_new_session=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)
