"""Faults of the network of a host that is in a network namespace of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar

from flyball.contracts.errors import ConfigurationError, NotFound, UsageError
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.kinds.namespaces import entry_of, is_apart, namespace_of
from simulator.inject.kinds.packet_delay import DelayedPackets

TOOL_TIMEOUT_S = 10.0
CUT_PREFERENCE = "1"  # after the rule of the local table, before all others
DEFAULT_HANDLE = "0:"  # of a discipline that nobody configured
MOST_HANDLES = 0xFFF0
PER_PERCENT = 100  # nftables counts in whole numbers
LONGEST_DELAY_MS = 10_000


class _Network(RealFault):
    """Adds something of its own in the host's network namespace, and removes exactly that at the end."""

    target = FaultTarget.HOST
    lasts_s = 20.0
    tools: ClassVar[tuple[str, ...]] = ("ip",)

    def lacks(self, site: FaultSite) -> str:
        daemon = site.host.daemon()
        if daemon is None or not is_apart(namespace_of(daemon.pid)):
            return "the host is not in a network namespace of its own: all that is on this machine would be cut off"
        missing = [tool for tool in ("nsenter", *self.tools) if shutil.which(tool) is None]
        return f"the commands {', '.join(missing)} are missing" if missing else ""

    def plan(self, site: FaultSite) -> Plan:
        daemon = site.host.daemon()
        if daemon is None:
            raise NotFound(f"The daemon of {site.host_id} does not run.", hint="start it, then try again")
        return {"namespace": namespace_of(daemon.pid)}


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
        if entry_of(plan["namespace"]) is None:
            return  # it is gone, and the rules with it
        for family in plan["families"]:
            if "blackhole" in _run(plan, "ip", family, "rule", "show", "pref", CUT_PREFERENCE):
                _run(plan, "ip", family, "rule", "del", "pref", CUT_PREFERENCE, "blackhole")


class NetSlow(_Network):
    """By a queueing discipline that has a handle of its own."""

    name = "net-slow"
    about = "a host sends no faster than this"
    options = (Option("kbit_per_s", 1_000, "kilobits per second"),)
    tools = ("ip", "tc")

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
        discipline = ["tbf", "rate", f"{site.count('kbit_per_s')}kbit", "burst", "32kb", "latency", "50ms"]
        return plan | {"interfaces": names, "handle": handle, "discipline": discipline}

    def inject(self, plan: Plan) -> None:
        for name in plan["interfaces"]:
            _run(plan, "tc", "qdisc", "add", "dev", name, "root", "handle", plan["handle"], *plan["discipline"])

    def undo(self, plan: Plan) -> None:
        if entry_of(plan["namespace"]) is None:
            return  # it is gone, and its interfaces with it
        for found in _root_disciplines(plan):
            if found["dev"] in plan["interfaces"] and found["handle"] == plan["handle"]:
                _run(plan, "tc", "qdisc", "del", "dev", found["dev"], "root", "handle", plan["handle"])


class NetLoss(_Network):
    name = "net-loss"
    about = "a part of the packets that a host receives is lost: a rule of nftables drops them at random"
    options = (Option("percent", 10.0, "of the packets, 0.01 to 100"),)
    tools = ("nft",)

    def plan(self, site: FaultSite) -> Plan:
        share = round(site.number("percent") * PER_PERCENT)
        if not 0 < share <= 100 * PER_PERCENT:
            raise UsageError("percent must be from 0.01 to 100.", hint="for example percent=10")
        return super().plan(site) | {"table": f"flyball-inject-{site.injection_id}", "share": share}

    def inject(self, plan: Plan) -> None:
        # Of what it receives: a packet that is dropped on its way out is told to its sender, which is no loss.
        _run(
            plan,
            "nft",
            f"table inet {plan['table']} {{ chain received {{ type filter hook prerouting priority raw;"
            f' iif != "lo" numgen random mod {100 * PER_PERCENT} < {plan["share"]} drop; }}; }}',
        )

    def undo(self, plan: Plan) -> None:
        if entry_of(plan["namespace"]) is None:
            return  # it is gone, and the rule with it
        if plan["table"] in _run(plan, "nft", "list", "tables").split():
            _run(plan, "nft", "delete", "table", "inet", plan["table"])


class NetDelay(_Network):
    name = "net-delay"
    about = "every packet that a host receives is delayed: this process holds it back in the kernel's queue"
    options = (Option("delay_ms", 100, f"milliseconds, up to {LONGEST_DELAY_MS:,}"),)
    tools = ("iptables",)

    def __init__(self) -> None:
        self._queues: dict[str, DelayedPackets] = {}  # of the delays that this process makes

    def plan(self, site: FaultSite) -> Plan:
        delay_ms = site.count("delay_ms")
        if not 0 < delay_ms <= LONGEST_DELAY_MS:
            raise UsageError(f"delay_ms must be from 1 to {LONGEST_DELAY_MS}.", hint="for example delay_ms=100")
        plan = super().plan(site)
        commands = ["iptables", *(["ip6tables"] if shutil.which("ip6tables") and _has_ipv6(plan) else [])]
        queue = str(1 + int(site.injection_id, 16) % MOST_HANDLES)
        return plan | {"commands": commands, "queue": queue, "delay_ms": delay_ms}

    def inject(self, plan: Plan) -> None:
        self._queues[plan["queue"]] = DelayedPackets(_entered(plan), int(plan["queue"]))
        for command in plan["commands"]:
            _run(plan, *_rules(command), "-A", *_to_queue(plan))

    def hold(self, plan: Plan, over: threading.Event) -> None:
        self._queues[plan["queue"]].serve(plan["delay_ms"] / 1000, over)

    def undo(self, plan: Plan) -> None:
        """The rules first, so that nothing more comes into the queue; what is in it is lost if it is closed too early.
        Once it is closed nothing is delayed, whatever became of the rules: the kernel lets packets pass whose queue
        nobody reads."""
        try:
            if entry_of(plan["namespace"]) is None:
                return  # it is gone, and the rules with it
            for command in plan["commands"]:
                if f"--queue-num {plan['queue']} " in _run(plan, *_rules(command), "-S", "PREROUTING"):
                    _run(plan, *_rules(command), "-D", *_to_queue(plan))
        finally:
            queue = self._queues.pop(plan["queue"], None)
            if queue is not None:
                queue.close()


def _rules(command: str) -> tuple[str, ...]:
    return (command, "--wait", str(int(TOOL_TIMEOUT_S / 2)), "--table", "raw")


def _to_queue(plan: Plan) -> tuple[str, ...]:
    jump = ("--jump", "NFQUEUE", "--queue-num", plan["queue"], "--queue-bypass")
    return ("PREROUTING", "!", "--in-interface", "lo", *jump)


def _has_ipv6(plan: Plan) -> bool:
    try:
        return bool(_run(plan, "cat", "/proc/self/net/if_inet6"))
    except ConfigurationError:
        return False  # the kernel has none


def _root_disciplines(plan: Plan) -> list[dict[str, Any]]:
    return [found for found in json.loads(_run(plan, "tc", "-json", "qdisc", "show")) if found.get("root")]


def _entered(plan: Plan) -> Path:
    entry = entry_of(plan["namespace"])
    if entry is None:
        raise NotFound("The host's network namespace is gone: nothing was done.", hint="start the host, then try again")
    return entry


def _run(plan: Plan, *words: str) -> str:
    """Run a command in the namespace of the plan; what it prints."""
    done = subprocess.run(
        ["nsenter", f"--net={_entered(plan)}", *words],
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
