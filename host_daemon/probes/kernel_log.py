"""The kernel's log: what it says about GPUs, memory, disks and links.

`findings_in` is pure. `KernelLog` reads /dev/kmsg, from where an earlier daemon of this boot found something last, or
else from its end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.findings import NotAvailableError, ProbeFinding, Reading
from host_daemon.probes.xids import meaning_of

RECORD_BYTES = 8_192  # the kernel's limit for one record
MAX_RECORDS = 20_000  # in one reading; the rest comes with the next
HOUR_S = 3_600.0
IO_ERROR = "io-error"
_RECORD = re.compile(r"\d+,(\d+),\d+,[^;]*;(.*)")


class KernelRecord(msgspec.Struct, frozen=True):
    seq: int
    text: str


def parse_record(raw: str) -> KernelRecord | None:
    """One record of /dev/kmsg: `6,1234,5678901,-;text`, then lines of keys. None if it is not one."""
    match = _RECORD.match(raw.partition("\n")[0])
    return KernelRecord(int(match[1]), match[2]) if match else None


def findings_in(text: str) -> ProbeFinding | None:
    """What a line of the log reports; None for nearly all."""
    for pattern, make in _PATTERNS:
        match = pattern.search(text)
        if match is not None:
            return make(match, text.strip()[:500])
    return None


def _xid(match: re.Match[str], line: str) -> ProbeFinding:
    number = int(match["xid"])
    meaning, severity = meaning_of(number)
    gpu = match["gpu"].removeprefix("PCI:")
    ttl_s = 0.0 if severity is Severity.CRITICAL else 24 * HOUR_S if severity is Severity.WARNING else HOUR_S
    return ProbeFinding(
        kind="xid",
        severity=severity,
        message=f"GPU {gpu} reported Xid {number}: {meaning}.",
        subject=f"gpu {gpu} xid {number}",
        evidence={"xid": number, "gpu": gpu, "line": line},
        ttl_s=ttl_s,
    )


def _oom(match: re.Match[str], line: str) -> ProbeFinding:
    where = "its memory cgroup" if "cgroup" in match["what"].lower() else "the host"
    return ProbeFinding(
        kind="oom-kill",
        severity=Severity.INFO,
        message=f"The kernel killed process {match['pid']} ({match['name']}): {where} was out of memory.",
        subject=f"pid {match['pid']}",
        evidence={"pid": int(match["pid"]), "process": match["name"], "line": line},
        ttl_s=HOUR_S,
    )


def _of_device(kind: str, severity: Severity, says: str, ttl_s: float) -> Callable[[re.Match[str], str], ProbeFinding]:
    def make(match: re.Match[str], line: str) -> ProbeFinding:
        subject = next((part for part in match.groups() if part), "")
        return ProbeFinding(kind, severity, says.format(subject), subject, {"line": line}, ttl_s)

    return make


_REAL_DISK = r"(?!loop|fd\d|sr\d|ram|zram)([\w!-]+)"
_PATTERNS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], ProbeFinding]], ...] = (
    (re.compile(r"NVRM: Xid \((?P<gpu>[^)]+)\): (?P<xid>\d+)"), _xid),
    (
        re.compile(r"(?P<what>(?:Memory cgroup o|O)ut of memory): Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)"),
        _oom,
    ),
    (
        re.compile(
            r"(?:I/O error, dev |[Bb]uffer I/O error on dev(?:ice)? |critical (?:medium|target) error, dev )"
            rf"{_REAL_DISK}"
        ),
        _of_device(IO_ERROR, Severity.WARNING, "The kernel reported I/O errors of disk {}.", HOUR_S),
    ),
    (
        re.compile(
            r"nvme (nvme\d+): (?:controller is down|I/O \d+ .*timeout, (?:aborting|reset controller)|Device not ready)"
        ),
        _of_device(IO_ERROR, Severity.WARNING, "The kernel lost contact with disk {}.", HOUR_S),
    ),
    (
        re.compile(
            r"(?:EXT4-fs \(([\w-]+)\): Remounting filesystem read-only"
            r"|XFS \(([\w-]+)\): .*(?:Shutting down filesystem|has been shut down)"
            r"|BTRFS.*\(device ([\w-]+)[^)]*\).*forced readonly)"
        ),
        _of_device("read-only-remount", Severity.WARNING, "The kernel made the file system of {} read-only.", 0.0),
    ),
    (
        re.compile(r"(?:\S+ ){1,2}?([\w.-]+): (?:NIC )?Link (?:is )?[Dd]own"),
        _of_device("link-lost", Severity.INFO, "The kernel reported that the link of {} went down.", HOUR_S),
    ),
    (
        re.compile(r"EDAC (MC\d+): \d+ UE "),
        _of_device("memory-uncorrected", Severity.WARNING, "Memory controller {} reported an uncorrected error.", 0.0),
    ),
    (
        re.compile(r"Memory failure: (0x[0-9a-f]+): "),
        _of_device("memory-uncorrected", Severity.WARNING, "The kernel took page {} out of use.", 0.0),
    ),
    (
        re.compile(r"EDAC (MC\d+): \d+ CE "),
        _of_device("memory-corrected", Severity.INFO, "Memory controller {} corrected an error.", 24 * HOUR_S),
    ),
    (
        re.compile(r"mce: \[Hardware Error\]: (?:CPU (\d+): )?Machine [Cc]heck"),
        _of_device("machine-check", Severity.INFO, "The processor reported a hardware error.", 24 * HOUR_S),
    ),
)


def is_fixed_disk(block: Path, name: str) -> bool:
    """Whether a disk, a partition, or what is stacked on disks, is not removable. `block`: /sys/block."""
    if name.startswith("nvme"):
        return True
    whole = block / name if (block / name).exists() else next(block.glob(f"*/{name}"), block / name / name).parent
    try:
        under = list((whole / "slaves").glob("*"))
        if under:
            return any(is_fixed_disk(block, disk.name) for disk in under)
        return (whole / "removable").read_text().strip() == "0"
    except OSError:  # it is gone: it was removable
        return False


class KernelLog:
    """Reads new records. A regular file with such records, one a line, stands for the device in tests."""

    source = "probe kernel-log"
    interval_s = 1.0
    deadline_s = 10.0

    def __init__(self, path: Path, mark: str = "", block: Path = Path("/sys/block")) -> None:
        """`mark`: of an earlier daemon of this boot, the last record that it reported about."""
        self._block = block
        self._path = path
        self._after_seq = int(mark) if mark else None
        self._file: int | None = None
        self._rest = b""
        self._mark = mark

    def read(self) -> Reading:
        if self._file is None:
            self._file = self._open()
        events = []
        for raw in self._records(self._file):
            record = parse_record(raw)
            if record is None or (self._after_seq is not None and record.seq <= self._after_seq):
                continue
            finding = findings_in(record.text)
            if finding is not None:
                events.append(self._rated(finding))
                self._mark = str(record.seq)
        return Reading(events=tuple(events), mark=self._mark)

    def _rated(self, finding: ProbeFinding) -> ProbeFinding:
        """Errors of a stick or a disc are no fault of the host."""
        if finding.kind != IO_ERROR or is_fixed_disk(self._block, finding.subject):
            return finding
        return msgspec.structs.replace(finding, severity=Severity.INFO)

    def _open(self) -> int:
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if self._after_seq is None:
                with contextlib.suppress(OSError):
                    os.lseek(file, 0, os.SEEK_END)
        except OSError as error:
            hint = "; it needs CAP_SYSLOG" if error.errno == errno.EPERM else ""
            raise NotAvailableError(f"{self._path} cannot be read: {error.strerror}{hint}") from error
        return file

    def _records(self, file: int) -> list[str]:
        if stat.S_ISREG(os.fstat(file).st_mode):
            data = self._rest + os.read(file, RECORD_BYTES * 64)
            *lines, self._rest = data.split(b"\n")
            return [line.decode(errors="replace") for line in lines]
        found: list[str] = []
        while len(found) < MAX_RECORDS:
            try:
                found.append(os.read(file, RECORD_BYTES).decode(errors="replace"))
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they were read
                continue
        return found
