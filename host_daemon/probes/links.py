"""Network links, Ethernet and InfiniBand, from /sys/class: a link that was up and stays down, and errors that grow.

A link that is down is a warning only where training or the host depends on it: InfiniBand, and the way of the default
route. Other network devices come and go: Wi-Fi roams, a laptop's cable is unplugged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.findings import NotAvailableError, ProbeFinding, Reading

ERRORS_PER_LOOK = 100  # of one counter, between two readings
TTL_S = 3_600.0
LINK_DOWN = "link-down"
DOWN_LOOKS = 6  # in a row, before it counts: a link may flap, or be trained anew
NONE: Mapping[str, Severity] = MappingProxyType({})
_IFF_UP = 1
_NET_COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_missed_errors")
_IB_COUNTERS = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "port_xmit_discards")


class Link(msgspec.Struct, frozen=True):
    """One link as /sys shows it."""

    name: str  # "net eth0", "infiniband mlx5_0 port 1"
    is_up: bool
    is_wanted: bool  # somebody configured it to be up
    errors: Mapping[str, int] = {}
    is_virtual: bool = False  # an SR-IOV function: it is lent to containers, and then not seen here


def link_findings(
    before: Mapping[str, Link], now: Mapping[str, Link], looks_down: Mapping[str, int], default_links: Collection[str]
) -> Reading:
    """What changed. `looks_down`: how often in a row each link was down that was up once; one that was never up has no
    cable: that is no fault. `default_links`: those that carry the default routes."""
    states, events = [], []
    has_default = any(link.is_up and name in default_links for name, link in now.items())
    for name, link in now.items():
        if looks_down.get(name, 0) >= DOWN_LOOKS:
            is_needed = name.startswith("infiniband ") or (name in default_links and not has_default)
            severity = Severity.WARNING if is_needed else Severity.INFO
            states.append(ProbeFinding(LINK_DOWN, severity, f"The link {name} is down.", name))
        if name not in before:
            continue
        for counter, count in link.errors.items():
            grown = count - before[name].errors.get(counter, count)
            if grown >= (1 if counter == "link_downed" else ERRORS_PER_LOOK):
                message = f"The link {name} counted {grown} more {counter.replace('_', ' ')}."
                evidence: dict[str, int] = {counter: grown}
                events.append(ProbeFinding("link-errors", Severity.INFO, message, f"{name} {counter}", evidence, TTL_S))
    return Reading(tuple(states), tuple(events))


def default_devices(route: str, ipv6_route: str) -> set[str]:
    """The network devices of the default routes. `route`, `ipv6_route`: the text of these files of /proc/net."""
    v4 = [words for line in route.splitlines() if len(words := line.split()) > 7]
    v6 = [words for line in ipv6_route.splitlines() if len(words := line.split()) == 10]
    found = {words[0] for words in v4 if words[1] == words[7] == "00000000"}  # destination and mask
    return found | {words[9] for words in v6 if words[0] == "0" * 32 and words[1] == "00"}


class Links:
    source = "probe link"
    deadline_s = 10.0

    def __init__(self, root: Path = Path("/"), down: Mapping[str, Severity] = NONE, interval_s: float = 5.0) -> None:
        """`down`: links that an earlier daemon reported as down, so that they are still known to be missed."""
        self._root = root
        self._looks_down = dict.fromkeys(down, DOWN_LOOKS)
        self._default = {
            name for name, severity in down.items() if severity is Severity.WARNING and name.startswith("net ")
        }
        self.interval_s = interval_s
        self._before: Mapping[str, Link] = {name: Link(name, is_up=False, is_wanted=True) for name in down}

    def read(self) -> Reading:
        seen = {link.name: link for link in (*self._ethernet(), *self._infiniband())}
        now = {**self._gone(seen), **seen}
        if not now:
            raise NotAvailableError(f"{self._root / 'sys/class/net'} has no network device with hardware")
        looks = self._looks_down
        is_missed = {name: link.is_wanted and not link.is_up for name, link in now.items()}
        self._looks_down = {
            name: looks.get(name, 0) + 1 if is_missed[name] else 0
            for name, link in now.items()
            if link.is_up or name in looks
        }
        self._default = self._default_links() or self._default  # a route may go with its link
        reading = link_findings(self._before, now, self._looks_down, self._default)
        self._before = now
        return reading

    def _gone(self, seen: Mapping[str, Link]) -> dict[str, Link]:
        """Links that were up once and are not there any more: they are down."""
        return {
            name: msgspec.structs.replace(link, is_up=False, errors={})
            for name, link in self._before.items()
            if name not in seen and name in self._looks_down and not link.is_virtual
        }

    def _default_links(self) -> set[str]:
        net = self._root / "proc/net"
        devices = default_devices(_text(net / "route"), _text(net / "ipv6_route"))
        return {f"net {name}" for device in devices for name in self._hardware(device)}

    def _hardware(self, device: str, depth: int = 4) -> set[str]:
        """The network devices with hardware under one: a bond, a bridge or a VLAN has some."""
        folder = self._root / "sys/class/net" / device
        if (folder / "device").exists():
            return {device}
        lower = [path.name.removeprefix("lower_") for path in folder.glob("lower_*")] if depth else []
        return {name for one in lower for name in self._hardware(one, depth - 1)}

    def _ethernet(self) -> Iterator[Link]:
        for device in _folders(self._root / "sys/class/net"):
            if not (device / "device").exists():  # a bridge, a tunnel, the loopback
                continue
            is_wanted = bool(int(_text(device / "flags") or "0", 16) & _IFF_UP)
            errors = _counters(device / "statistics", _NET_COUNTERS)
            is_up = _text(device / "operstate") in ("up", "unknown")
            yield Link(f"net {device.name}", is_up, is_wanted, errors, _is_virtual(device))

    def _infiniband(self) -> Iterator[Link]:
        for device in _folders(self._root / "sys/class/infiniband"):
            for port in _folders(device / "ports"):
                is_up = _text(port / "state").endswith("ACTIVE")
                errors = _counters(port / "counters", _IB_COUNTERS)
                yield Link(f"infiniband {device.name} port {port.name}", is_up, True, errors, _is_virtual(device))


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


def _is_virtual(device: Path) -> bool:
    return (device / "device/physfn").exists()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _counters(folder: Path, names: Collection[str]) -> dict[str, int]:
    found = {name: _text(folder / name) for name in names}
    return {name: int(text) for name, text in found.items() if text.isdecimal()}
