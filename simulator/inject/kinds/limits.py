"""Faults by the kernel's own limits: a cgroup for a rank's processor time, and the network of a host that has one of
its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from flyball.contracts.errors import ConfigurationError, NotFound
from simulator.inject.faults import running_worker
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.processes import own_processes

CGROUP = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
TOOL_TIMEOUT_S = 10.0
NAMED = Path("/run/netns")  # where `ip netns` keeps namespaces, also those without processes
CUT_PREFERENCE = "1"  # after the rule of the local table, before all others
DEFAULT_HANDLE = "0:"  # of a discipline that nobody configured
MOST_HANDLES = 0xFFF0


class CpuLimit(RealFault):
    name = "cpu-limit"
    about = "the kernel gives a rank's processes a share of one processor only"
    target = FaultTarget.RANK
    options = (Option("share", 0.2, "of one processor"),)
    lasts_s = 30.0

    def lacks(self, site: FaultSite) -> str:
        v2 = CGROUP / "cgroup.subtree_control"
        if (CGROUP / "cpu/cpu.cfs_quota_us").exists() or (v2.exists() and "cpu" in v2.read_text().split()):
            root = CGROUP / "cpu" if not v2.exists() else CGROUP
            return "" if os.access(root, os.W_OK) else "cgroups may not be made here"
        return "there is no cgroup controller for processors"

    def plan(self, site: FaultSite) -> Plan:
        _, process = running_worker(site.host, site.job, site.rank, site.host_id)
        is_v2 = (CGROUP / "cgroup.subtree_control").exists()
        root = CGROUP if is_v2 else CGROUP / "cpu"
        own = next(
            line.split(":", 2)[2]
            for line in Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
            if (line.startswith("0::") if is_v2 else "cpu" in line.split(":")[1].split(","))
        )
        return {
            "session": process.session,
            "group": str(root / f"flyball-inject-{site.injection_id}"),
            "before": str(root / own.lstrip("/")),
            "limit": ["cpu.max", f"{int(site.number('share') * PERIOD_US)} {PERIOD_US}"]
            if is_v2
            else ["cpu.cfs_quota_us", str(int(site.number("share") * PERIOD_US))],
        }

    def inject(self, plan: Plan) -> None:
        group = Path(plan["group"])
        group.mkdir(exist_ok=True)
        name, limit = plan["limit"]
        (group / name).write_text(limit)
        members = [p.pid for p in own_processes() if p.session == plan["session"]]
        if not members:
            raise NotFound("The rank has ended: nothing was done.", hint="wait until it runs again, then try again")
        _move(members, group)

    def undo(self, plan: Plan) -> None:
        group = Path(plan["group"])
        if group.exists():
            _move([int(pid) for pid in (group / "cgroup.procs").read_text().split()], Path(plan["before"]))
            group.rmdir()


def _move(pids: list[int], group: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


# --- the network of a host that is in a namespace of its own ----------------------------------------------------------


class _Network(RealFault):
    """Adds something of its own in the host's network namespace, and removes exactly that at the end."""

    target = FaultTarget.HOST
    lasts_s = 20.0

    def lacks(self, site: FaultSite) -> str:
        daemon = site.host.daemon()
        if daemon is None or not _is_own(_namespace(daemon.pid)):
            return "the host is not in a network namespace of its own: all that is on this machine would be cut off"
        missing = [tool for tool in ("nsenter", "ip", "tc") if shutil.which(tool) is None]
        return f"the commands {', '.join(missing)} are missing" if missing else ""

    def plan(self, site: FaultSite) -> Plan:
        daemon = site.host.daemon()
        if daemon is None:
            raise NotFound(f"The daemon of {site.host_id} does not run.", hint="start it, then try again")
        return {"namespace": _namespace(daemon.pid)}


class NetCut(_Network):
    name = "net-cut"
    about = "a host is cut off: a routing rule drops all that it sends, so no connection works. Its addresses stay"
    causes = ("host_silent",)

    def plan(self, site: FaultSite) -> Plan:
        plan = super().plan(site)
        # The interfaces stay up: taken down, they would lose their routes and IPv6 addresses, which nobody puts back.
        families = ["-4", *(["-6"] if _has_ipv6(plan) else [])]
        if any(_run(plan, "ip", family, "rule", "show", "pref", CUT_PREFERENCE) for family in families):
            raise NotFound(
                f"{site.host_id} has a routing rule of preference {CUT_PREFERENCE}: it may be cut off already.",
                hint="wait until it is back, or remove the rule",
            )
        return plan | {"families": families}

    def inject(self, plan: Plan) -> None:
        for family in plan["families"]:
            _run(plan, "ip", family, "rule", "add", "pref", CUT_PREFERENCE, "blackhole")

    def undo(self, plan: Plan) -> None:
        if _entry(plan["namespace"]) is None:
            return  # it is gone, and the rules with it
        for family in plan["families"]:
            if "blackhole" in _run(plan, "ip", family, "rule", "show", "pref", CUT_PREFERENCE):
                _run(plan, "ip", family, "rule", "del", "pref", CUT_PREFERENCE, "blackhole")


class _Shaped(_Network):
    """With a queueing discipline that has a handle of its own."""

    def discipline(self, site: FaultSite) -> list[str]:
        """Its kind and settings, as `tc` has them."""
        raise NotImplementedError

    def plan(self, site: FaultSite) -> Plan:
        plan = super().plan(site)
        links = json.loads(_run(plan, "ip", "-json", "link", "show", "up"))
        names = [link["ifname"] for link in links if link["ifname"] != "lo"]
        if not names:
            raise NotFound(f"No network interface of {site.host_id} is up.", hint="set one up, then try again")
        for found in _root_disciplines(plan):
            if found["dev"] in names and found["handle"] != DEFAULT_HANDLE:
                raise NotFound(
                    f"The interface {found['dev']} of {site.host_id} has a queueing discipline already"
                    f" ({found['kind']} {found['handle']}): it would be lost.",
                    hint="wait until an earlier fault is over, or remove it (tc qdisc del)",
                )
        handle = f"{1 + int(site.injection_id, 16) % MOST_HANDLES:x}:"
        return plan | {"interfaces": names, "handle": handle, "discipline": self.discipline(site)}

    def inject(self, plan: Plan) -> None:
        for name in plan["interfaces"]:
            _run(plan, "tc", "qdisc", "add", "dev", name, "root", "handle", plan["handle"], *plan["discipline"])

    def undo(self, plan: Plan) -> None:
        if _entry(plan["namespace"]) is None:
            return  # it is gone, and its interfaces with it
        for found in _root_disciplines(plan):
            if found["dev"] in plan["interfaces"] and found["handle"] == plan["handle"]:
                _run(plan, "tc", "qdisc", "del", "dev", found["dev"], "root", "handle", plan["handle"])


class NetDelay(_Shaped):
    name = "net-delay"
    about = "every packet that a host sends is delayed"
    options = (Option("delay_ms", 100, "milliseconds"),)

    def discipline(self, site: FaultSite) -> list[str]:
        return ["netem", "delay", f"{site.count('delay_ms')}ms"]


class NetLoss(_Shaped):
    name = "net-loss"
    about = "a part of the packets that a host sends is lost"
    options = (Option("percent", 10, "of the packets"),)

    def discipline(self, site: FaultSite) -> list[str]:
        return ["netem", "loss", f"{site.count('percent')}%"]


class NetSlow(_Shaped):
    name = "net-slow"
    about = "a host sends no faster than this"
    options = (Option("kbit_per_s", 1_000, "kilobits per second"),)

    def discipline(self, site: FaultSite) -> list[str]:
        return ["tbf", "rate", f"{site.count('kbit_per_s')}kbit", "burst", "32kb", "latency", "50ms"]


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _is_own(namespace: str) -> bool:
    return bool(namespace) and namespace not in (_namespace(1), str(Path("/proc/self/ns/net").readlink()))


def _entry(namespace: str) -> Path | None:
    """A way into the namespace: a process that is in it, or its name. None: it is gone."""
    for process in own_processes():
        if _namespace(process.pid) == namespace:
            return Path(f"/proc/{process.pid}/ns/net")
    inode = int(namespace.strip("net:[]"))
    with suppress(OSError):
        return next((path for path in NAMED.iterdir() if path.stat().st_ino == inode), None)
    return None


def _has_ipv6(plan: Plan) -> bool:
    try:
        return bool(_run(plan, "cat", "/proc/self/net/if_inet6"))
    except ConfigurationError:
        return False  # the kernel has none


def _root_disciplines(plan: Plan) -> list[dict[str, Any]]:
    return [found for found in json.loads(_run(plan, "tc", "-json", "qdisc", "show")) if found.get("root")]


def _run(plan: Plan, *words: str) -> str:
    """Run a command in the namespace of the plan; what it prints."""
    entry = _entry(plan["namespace"])
    if entry is None:
        raise NotFound("The host's network namespace is gone: nothing was done.", hint="start the host, then try again")
    done = subprocess.run(
        ["nsenter", f"--net={entry}", *words],
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise ConfigurationError(
            f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}.",
            hint="it needs CAP_NET_ADMIN, and a kernel that has it",
        )
    return done.stdout
