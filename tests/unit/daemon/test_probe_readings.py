"""Probes of pressure, disks, clock, GPUs and links, on recorded readings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.clock_jumps import ClockJumps, jump_finding
from host_daemon.probes.disks import Disks, Space, disk_findings
from host_daemon.probes.findings import NotAvailableError, Reading
from host_daemon.probes.gpus import SLOW_LOOKS, Gpus, RecordedNvml, Trend
from host_daemon.probes.links import DOWN_LOOKS, Links, default_devices
from host_daemon.probes.pressure import (
    Pressure,
    cgroup_of,
    event_findings,
    memory_bytes,
    parse_counters,
    parse_pressure,
)

GIB = 1 << 30


def kinds(reading: Reading) -> list[tuple[str, str]]:
    return [(finding.kind, finding.severity.value) for finding in (*reading.states, *reading.events)]


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- pressure --------------------------------------------------------------------------------------------------------

PSI = "some avg10=1.02 avg60=33.40 avg300=12.08 total=1234567\nfull avg10=0.88 avg60={} avg300=9.00 total=1000000\n"
EVENTS = "low 0\nhigh 12\nmax 3\noom 1\noom_kill {}\noom_group_kill 0\n"


def test_pressure_files() -> None:
    assert parse_pressure(PSI.format("31.50")) == {"some": 33.4, "full": 31.5}
    assert parse_pressure("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n") == {"some": 0.0}
    assert parse_counters("MemTotal:       65536000 kB\nHugePages_Total:       0\n")["MemTotal"] == 65_536_000
    assert cgroup_of("12:memory:/x\n0::/system.slice/flyball.service\n") == "/system.slice/flyball.service"
    (killed,) = event_findings(parse_counters(EVENTS.format(1)), parse_counters(EVENTS.format(3)), "/x")
    assert killed.kind == "oom-kill" and killed.evidence == {"oom_kill": 2}


def test_the_memory_for_ranks_is_the_hosts_or_the_least_limit_of_its_cgroups(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == 0
    put(tmp_path / "proc/meminfo", "MemTotal: 8388608 kB\n")
    put(tmp_path / "proc/self/cgroup", "0::/pod/job\n")
    assert memory_bytes(tmp_path) == 8 * GIB
    put(tmp_path / "sys/fs/cgroup/pod/job/memory.max", "max\n")
    put(tmp_path / "sys/fs/cgroup/pod/memory.max", f"{2 * GIB}\n")
    assert memory_bytes(tmp_path) == 2 * GIB


def test_pressure_of_the_host_and_of_the_cgroup(tmp_path: Path) -> None:
    with pytest.raises(NotAvailableError):
        Pressure(tmp_path).read()
    put(tmp_path / "proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    put(tmp_path / "proc/self/cgroup", "0::/job\n")
    folder = tmp_path / "sys/fs/cgroup/job"
    put(folder / "memory.events", EVENTS.format(1))
    probe = Pressure(tmp_path)
    assert kinds(probe.read()) == [], "kills before the daemon are not news"
    put(folder / "memory.events", EVENTS.format(2))
    put(folder / "memory.pressure", PSI.format("31.50"))
    put(tmp_path / "proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 20000 kB\n")
    assert kinds(probe.read()) == [("memory-low", "info"), ("memory-pressure", "info"), ("oom-kill", "info")]


def test_this_machines_pressure_is_read() -> None:
    assert all(finding.severity is Severity.INFO for finding in Pressure().read().states)


# --- disks -----------------------------------------------------------------------------------------------------------


def test_spaces() -> None:
    def found(total: int, free: int, *, read_only: bool = False) -> list[tuple[str, str]]:
        return kinds(Reading(tuple(disk_findings("the state folder", Path("/s"), Space(total, free, read_only)))))

    assert found(100 * GIB, 50 * GIB) == []
    assert found(100 * GIB, 4 * GIB) == [("disk-full", "info")]
    assert found(100 << 20, 20 << 20) == [], "a small one need not have 256 MiB"
    assert found(100 << 20, 2 << 20) == [("disk-full", "info")]
    assert found(100 * GIB, 50 * GIB, read_only=True) == [("read-only", "warning")]
    assert found(0, 0) == [], "a file system without a size"


def test_one_file_system_is_reported_once(tmp_path: Path) -> None:
    assert Disks(lambda: {"the state folder": tmp_path, "the disk tier": tmp_path}).read().events == ()
    with pytest.raises(NotAvailableError, match="No such file"):
        Disks(lambda: {"the state folder": tmp_path / "gone"}).read()


MOUNTED = """
import os, subprocess, sys
from pathlib import Path
from host_daemon.probes.disks import Disks
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
probe = Disks(lambda: {"the disk tier": Path(folder)})
look = lambda: [(f.kind, f.severity.value) for f in probe.read().states]
seen = [look()]
Path(folder, "data").write_bytes(bytes(8 << 20) if False else bytes(7_900_000))
seen.append(look())
Path(folder, "data").unlink()
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
seen.append(look())
print(seen)
"""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_full_and_a_read_only_file_system(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", MOUNTED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip("no mounts in a namespace of its own here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([[], [("disk-full", "info")], [("read-only", "warning")]])


# --- clock -----------------------------------------------------------------------------------------------------------


class TwoClocks:
    def __init__(self) -> None:
        self.wall, self.monotonic = 1000.0, 5.0

    def wall_s(self) -> float:
        return self.wall

    def monotonic_s(self) -> float:
        return self.monotonic


def test_jumps_of_the_clock() -> None:
    clock = TwoClocks()
    probe = ClockJumps(clock)
    clock.wall, clock.monotonic = 1060.4, 65.0
    assert probe.read() == Reading(), "slewed by NTP"
    clock.wall -= 25.0
    (back,) = probe.read().events
    assert back.message == "The host's clock jumped 25.0 s backwards." and back.severity is Severity.INFO
    assert probe.read() == Reading(), "it is reported once"
    assert jump_finding(0.9) is None


# --- GPUs ------------------------------------------------------------------------------------------------------------

WELL = {
    "pci": "00000000:3B:00.0",
    "corrected": 0,
    "uncorrected": 0,
    "remapped": [0, 0, 0, 0],
    "throttles": 0,
    "celsius": 40,
}


class Box:
    """A machine with recorded GPUs."""

    def __init__(self, path: Path) -> None:
        self.path, self.now_s = path, 0.0
        self.probe = Gpus(RecordedNvml(path), lambda: self.now_s)

    def look(self, *gpus: dict[str, object]) -> list[tuple[str, str]]:
        self.path.write_text(json.dumps({"gpus": gpus}))
        return kinds(self.probe.read())


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "nvml.json")


def test_a_machine_without_gpus(tmp_path: Path, box: Box) -> None:
    with pytest.raises(NotAvailableError, match="NVML does not start"):
        box.probe.read()
    with pytest.raises(NotAvailableError, match="no GPU"):
        box.look()


def test_a_gpu_that_is_lost(box: Box) -> None:
    other = {**WELL, "pci": "00000000:5E:00.0"}
    assert box.look(WELL, other) == []
    assert box.look({**WELL, "lost": True}, other) == [("gpu-lost", "critical")]
    assert box.look(WELL) == [("gpu-lost", "critical")], "NVML does not even count it any more"
    (finding,) = box.probe.read().states
    assert finding.subject == "0000:5e:00.0" and finding.is_remembered
    assert box.look(WELL, other) == []


class TroubledNvml(RecordedNvml):
    """Raises errors of one's choice, by function, and counts its starts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.errors: dict[str, int] = {}
        self.starts = 0

    def _fail(self, function: str) -> None:
        if function in self.errors:
            raise self.NVMLError(self.errors[function], f"error {self.errors[function]}")

    def nvmlInit(self) -> None:
        self.starts += 1

    def nvmlDeviceGetCount(self) -> int:
        self._fail("count")
        return super().nvmlDeviceGetCount()

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._fail(f"handle {index}")
        return super().nvmlDeviceGetHandleByIndex(index)


@pytest.fixture
def troubled(box: Box) -> TroubledNvml:
    nvml = TroubledNvml(box.path)
    box.probe = Gpus(nvml, lambda: box.now_s)
    return nvml


def test_only_an_error_that_says_so_is_a_lost_gpu(box: Box, troubled: TroubledNvml) -> None:
    other = {**WELL, "pci": "00000000:5E:00.0"}
    box.look(WELL, other)
    for code in (1, 3, 4, 10, 16, 999):  # not started, not supported, no permission, time-out, interrupts, unknown
        troubled.errors = {"handle 0": code}
        with pytest.raises(NotAvailableError, match=f"GPU number 0: error {code}"):
            box.look(WELL, other)
    for code in (15, 6):
        troubled.errors = {"handle 0": code}
        assert box.look(WELL, other) == [("gpu-lost", "critical")]
        assert box.probe.read().states[0].subject == "0000:3b:00.0"
    troubled.errors = {}
    assert box.look(other) == [("gpu-lost", "critical")], "another GPU has its number now"
    assert box.probe.read().states[0].subject == "0000:3b:00.0"


def test_nvml_starts_again_after_it_could_not_count(box: Box, troubled: TroubledNvml) -> None:
    assert box.look(WELL) == box.look(WELL) == [] and troubled.starts == 1
    troubled.errors = {"count": 1}
    with pytest.raises(NotAvailableError, match="counts no GPUs"):
        box.look(WELL)
    troubled.errors = {}
    assert box.look(WELL) == [] and troubled.starts == 2


def test_memory_errors_of_a_gpu(box: Box) -> None:
    assert box.look({**WELL, "remapped": [0, 1, 1, 0]}) == [("row-remap-pending", "warning")]
    assert box.look({**WELL, "remapped": [0, 1, 0, 1]}) == [("row-remap-failed", "critical")]
    assert box.look({**WELL, "uncorrected": 1}) == [("ecc-uncorrected", "warning")]
    assert box.look({key: value for key, value in WELL.items() if key in ("pci", "celsius")}) == [], "not supported"


def test_a_trend_of_corrected_errors(box: Box) -> None:
    assert box.look({**WELL, "corrected": 5_000}) == [], "a count is no trend"
    box.now_s = 1_800.0
    assert box.look({**WELL, "corrected": 5_100}) == [("ecc-corrected", "warning")]
    box.now_s = 3_700.0
    assert box.look({**WELL, "corrected": 5_150}) == [], "within the last hour it was less"
    trend = Trend()
    assert (trend.growth(50, 0.0), trend.growth(3, 1.0), trend.growth(10, 2.0)) == (0, 0, 7)


def test_a_gpu_that_stays_slow(box: Box) -> None:
    hot = {**WELL, "throttles": 0x40 | 0x20, "celsius": 92}
    looks = [box.look(hot) for _ in range(SLOW_LOOKS)]
    assert looks[-2] == [] and looks[-1] == [("thermal", "warning"), ("thermal-limit", "info")]
    assert box.look(WELL) == []


# --- links -----------------------------------------------------------------------------------------------------------


def ethernet(root: Path, name: str, *, state: str, errors: int = 0, flags: str = "0x1003") -> None:
    folder = root / "sys/class/net" / name
    (folder / "device").mkdir(parents=True, exist_ok=True)
    put(folder / "operstate", f"{state}\n")
    put(folder / "flags", f"{flags}\n")
    put(folder / "statistics/rx_crc_errors", f"{errors}\n")


def infiniband(root: Path, state: str, downed: int) -> None:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    put(port / "state", f"{state}\n")
    put(port / "counters/link_downed", f"{downed}\n")


def default_route(root: Path, device: str) -> None:
    put(root / "proc/net/route", f"Iface Destination ...\n{device} 00000000 010200C0 0003 0 0 0 00000000 0 0 0\n")


def look(links: Links, looks: int = DOWN_LOOKS) -> dict[str, str]:
    """The links that are down after so many looks."""
    readings = [links.read() for _ in range(looks)]
    return {finding.subject: finding.severity.value for finding in readings[-1].states}


def test_links_that_go_down(tmp_path: Path) -> None:
    with pytest.raises(NotAvailableError):
        Links(tmp_path).read()
    for name in ("eth0", "wlan0"):
        ethernet(tmp_path, name, state="up")
    ethernet(tmp_path, "eth1", state="down")
    put(tmp_path / "sys/class/net/lo/operstate", "unknown\n")
    infiniband(tmp_path, "4: ACTIVE", 0)
    default_route(tmp_path, "eth0")
    links = Links(tmp_path)
    assert look(links) == {}, "a port without a cable is no fault"
    for name in ("eth0", "wlan0"):
        ethernet(tmp_path, name, state="down")
    infiniband(tmp_path, "1: DOWN", 1)
    put(tmp_path / "proc/net/route", "")
    assert kinds(links.read()) == [("link-errors", "info")], "it may flap"
    assert look(links, DOWN_LOOKS - 2) == {}
    down = {"net eth0": "warning", "net wlan0": "info", "infiniband mlx5_0 port 1": "warning"}
    assert look(links, 1) == down
    again = Links(tmp_path, {name: Severity(severity) for name, severity in down.items()})
    assert look(again, 1) == down, "the next daemon goes on at once"
    ethernet(tmp_path, "eth0", state="down", flags="0x1002")
    ethernet(tmp_path, "wlan0", state="up")
    infiniband(tmp_path, "4: ACTIVE", 1)
    assert look(links, 1) == {}, "taken down by an operator, and back"
    ethernet(tmp_path, "wlan0", state="down")
    assert look(links, DOWN_LOOKS - 1) == {}, "looks in a row"


def test_links_that_vanish_are_down(tmp_path: Path) -> None:
    for name in ("eth0", "usb0", "eth0v1"):
        ethernet(tmp_path, name, state="up")
    put(tmp_path / "sys/class/net/eth0v1/device/physfn", "")
    default_route(tmp_path, "eth0")
    links = Links(tmp_path)
    assert look(links, 1) == {}
    for name in ("eth0", "usb0", "eth0v1"):
        shutil.rmtree(tmp_path / "sys/class/net" / name)
    down = {"net eth0": "warning", "net usb0": "info"}
    assert look(links) == down, "the virtual function was lent to a container"
    again = Links(tmp_path, {name: Severity(severity) for name, severity in down.items()})
    assert look(again, 1) == down
    ethernet(tmp_path, "eth9", state="up")
    default_route(tmp_path, "eth9")
    assert look(links, 1) == dict.fromkeys(down, "info"), "the host has another way now"


def test_the_default_route_over_a_bond(tmp_path: Path) -> None:
    for name in ("eth0", "eth1"):
        ethernet(tmp_path, name, state="up")
        (tmp_path / f"sys/class/net/bond0/lower_{name}").mkdir(parents=True)
    (tmp_path / "sys/class/net/vlan7/lower_bond0").mkdir(parents=True)
    default_route(tmp_path, "vlan7")
    links = Links(tmp_path)
    links.read()
    ethernet(tmp_path, "eth0", state="down")
    assert look(links) == {"net eth0": "info"}, "the bond goes on over the other"
    ethernet(tmp_path, "eth1", state="down")
    assert look(links) == {"net eth0": "warning", "net eth1": "warning"}


def test_default_routes() -> None:
    v4 = (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    zeros, gateway = "0" * 32, "fd000000000000000000000000000001"
    v6 = (
        f"fe800000000000000000000000000000 40 {zeros} 00 {zeros} 00000100 00000002 00000000 00000001     eth3\n"
        f"{zeros} 00 {zeros} 00 {gateway} 00000400 00000003 00000000 00000003     eth2\n"
    )
    assert default_devices(v4, v6) == {"eth0", "eth2"} and default_devices("", "") == set()


def test_errors_of_a_link_that_grow(tmp_path: Path) -> None:
    ethernet(tmp_path, "eth0", state="up", errors=10_000)
    links = Links(tmp_path)
    links.read()
    ethernet(tmp_path, "eth0", state="up", errors=10_050)
    assert kinds(links.read()) == []
    ethernet(tmp_path, "eth0", state="up", errors=10_250)
    assert kinds(links.read()) == [("link-errors", "info")]
