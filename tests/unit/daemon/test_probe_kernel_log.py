"""What the kernel's log says, on recorded lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.findings import NotAvailableError
from host_daemon.probes.kernel_log import KernelLog, findings_in, parse_record
from host_daemon.probes.xids import XIDS, meaning_of

INFO, WARNING, CRITICAL = Severity.INFO, Severity.WARNING, Severity.CRITICAL

LINES = [
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
     "xid", CRITICAL, "gpu 0000:3b:00 xid 79"),
    ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
     "xid", WARNING, "gpu 0000:10:1c xid 63"),
    ("NVRM: Xid (PCI:0000:07:00): 31, pid=91234, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS "
     "GPCCLIENT_T1_0 faulted @ 0x7f2c_9e000000. Fault is of type FAULT_PDE ACCESS_TYPE_READ",
     "xid", INFO, "gpu 0000:07:00 xid 31"),
    ("NVRM: Xid (PCI:0000:9b:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 6"
     "(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "xid", WARNING, "gpu 0000:9b:00 xid 74"),
    ("NVRM: Xid (PCI:0000:5e:00): 119, pid=5125, name=nvidia-smi, Timeout waiting for RPC from GSP0! Expected function "
     "76 (GSP_RM_CONTROL) (0x20802a02 0x8).", "xid", CRITICAL, "gpu 0000:5e:00 xid 119"),
    ("Out of memory: Killed process 12345 (python3) total-vm:98304000kB, anon-rss:62914560kB, file-rss:0kB, "
     "shmem-rss:0kB, UID:1000 pgtables:123456kB oom_score_adj:0", "oom-kill", INFO, "pid 12345"),
    ("Memory cgroup out of memory: Killed process 4242 (pt_main_thread) total-vm:20971520kB, anon-rss:8388608kB, "
     "file-rss:2048kB, shmem-rss:0kB, UID:0 pgtables:20480kB oom_score_adj:969", "oom-kill", INFO, "pid 4242"),
    ("blk_update_request: I/O error, dev sda, sector 976773168 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
     "io-error", WARNING, "sda"),
    ("I/O error, dev nvme0n1, sector 1953525160 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2",
     "io-error", WARNING, "nvme0n1"),
    ("Buffer I/O error on dev dm-0, logical block 0, async page read", "io-error", WARNING, "dm-0"),
    ("critical medium error, dev sdb, sector 2048 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
     "io-error", WARNING, "sdb"),
    ("nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10", "io-error", WARNING, "nvme1"),
    ("nvme nvme0: I/O 12 QID 3 timeout, aborting", "io-error", WARNING, "nvme0"),
    ("EXT4-fs (sda1): Remounting filesystem read-only", "read-only-remount", WARNING, "sda1"),
    ("XFS (dm-3): Log I/O Error Detected. Shutting down filesystem", "read-only-remount", WARNING, "dm-3"),
    ("XFS (nvme0n1p1): Filesystem has been shut down due to log error (0x2).",
     "read-only-remount", WARNING, "nvme0n1p1"),
    ("BTRFS info (device sdc1: state EA): forced readonly", "read-only-remount", WARNING, "sdc1"),
    ("e1000e 0000:00:1f.6 eno1: NIC Link is Down", "link-lost", INFO, "eno1"),
    ("mlx5_core 0000:5e:00.0 ens1f0np0: Link down", "link-lost", INFO, "ens1f0np0"),
    ("bnxt_en 0000:3b:00.1 eth1: NIC Link is Down", "link-lost", INFO, "eth1"),
    ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x7f2c9e offset:0x0 "
     "grain:32 syndrome:0x0)", "memory-corrected", INFO, "MC0"),
    ("EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#0_DIMM#1 (channel:0 slot:1 page:0x1b3 offset:0x0)",
     "memory-uncorrected", WARNING, "MC1"),
    ("Memory failure: 0x3f4a2b: recovery action for dirty LRU page: Recovered",
     "memory-uncorrected", WARNING, "0x3f4a2b"),
    ("mce: [Hardware Error]: Machine check events logged", "machine-check", INFO, ""),
]  # fmt: skip

HARMLESS = [
    "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
    "mlx5_core 0000:5e:00.0 ens1f0np0: Link up",
    "e1000e 0000:00:1f.6 eno1: NIC Link is Up 1000 Mbps Full Duplex, Flow Control: Rx/Tx",
    "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "Buffer I/O error on dev sr0, logical block 0, async page read",
    "I/O error, dev loop3, sector 8 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
    "EXT4-fs (sda1): mounted filesystem with ordered data mode. Quota mode: none.",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
    "python3 invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, oom_score_adj=0",
    "MCE: In-kernel MCE decoding enabled.",
    "EDAC MC: Ver: 3.0.0",
]


@pytest.mark.parametrize(("line", "kind", "severity", "subject"), LINES)
def test_recorded_lines(line: str, kind: str, severity: Severity, subject: str) -> None:
    found = findings_in(line)
    assert found is not None
    assert (found.kind, found.severity, found.subject) == (kind, severity, subject)
    assert found.evidence["line"] == line[:500] and found.message.endswith(".")
    if severity is CRITICAL:
        assert found.ttl_s == 0.0, "it stands until the host is reset"


@pytest.mark.parametrize("line", HARMLESS)
def test_lines_that_say_nothing_is_wrong(line: str) -> None:
    assert findings_in(line) is None


def test_xids() -> None:
    assert len(XIDS) >= 30
    assert meaning_of(79) == ("the GPU has fallen off the bus", CRITICAL)
    assert meaning_of(9999)[1] is INFO, "an unknown number moves no job"


def test_records() -> None:
    record = parse_record("6,1234,5678901,-;NVRM: loading\n SUBSYSTEM=pci\n")
    assert record is not None and (record.seq, record.text) == (1234, "NVRM: loading")
    assert parse_record("4,17,1,c,caller=T1;a;b") is not None
    assert parse_record("not a record") is None


def written(path: Path, *lines: str, first: int) -> None:
    with path.open("a") as file:
        for number, line in enumerate(lines, first):
            file.write(f"6,{number},100,-;{line}\n")


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    written(path, LINES[0][0], first=1)
    log = KernelLog(path)
    assert log.read().events == (), "it was there before the daemon"
    written(path, "usb 1-1: new device", LINES[1][0], first=2)
    (found,) = log.read().events
    assert found.evidence["xid"] == 63
    assert log.read().events == ()
    with path.open("a") as file:
        file.write("6,4,100,-;NVRM: Xid (PCI:0000:3b:00): 4")
        file.flush()
        assert log.read().events == (), "a line without its end"
        file.write("8, pid=7, DBE\n")
    again = log.read()
    assert again.events[0].evidence["xid"] == 48 and again.mark == "4"

    written(path, LINES[0][0], first=5)
    (missed,) = KernelLog(path, again.mark).read().events
    assert missed.evidence["xid"] == 79, "what came while no daemon ran"


def test_errors_of_a_removable_disk_are_on_record_only(tmp_path: Path) -> None:
    block = tmp_path / "sys/block"
    for disk, removable in (("sda", "0"), ("sdb", "1"), ("dm-0", "0"), ("dm-1", "0")):
        (block / disk / "slaves").mkdir(parents=True)
        (block / disk / "removable").write_text(f"{removable}\n")
        (block / disk / f"{disk}1").mkdir()
    (block / "dm-0/slaves/sda1").mkdir()
    (block / "dm-1/slaves/sdb1").mkdir()
    disks = ("sda", "sda1", "dm-0", "nvme0n1", "sdb", "sdb1", "dm-1", "sdz")
    log = KernelLog(tmp_path / "kmsg", "0", block)
    written(tmp_path / "kmsg", *(f"I/O error, dev {disk}, sector 8 op 0x0:(READ)" for disk in disks), first=1)
    rated = {finding.subject: finding.severity for finding in log.read().events}
    assert rated == {**dict.fromkeys(disks[:4], WARNING), **dict.fromkeys(disks[4:], INFO)}


def test_a_log_that_cannot_be_read_is_not_available(tmp_path: Path) -> None:
    with pytest.raises(NotAvailableError, match="No such file"):
        KernelLog(tmp_path / "kmsg").read()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg cannot be read here")
def test_this_machines_log_is_read() -> None:
    try:
        assert KernelLog(Path("/dev/kmsg")).read().events == ()
    except NotAvailableError as error:
        pytest.skip(str(error))
