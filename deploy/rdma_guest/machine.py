"""Guests: virtual machines on one network, each started with a command, their consoles read, ended by pid."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rdma_guest.image import GuestFiles, Unavailable, guest_files, initramfs

QEMU = "qemu-system-x86_64"
NETWORK = "10.77.0"
KERNEL_PARAMETERS = "console=ttyS0 quiet panic=-1 mitigations=off"
# Emulated, "rep movsb" copies byte by byte, and each access of a user's memory ends a translated block: without these,
# RDMA is several times as fast.
EMULATED_CPU = "max,-erms,-smap,-smep,-umip,-pku,-la57"
EMULATED_PARAMETERS = " clearcpuid=rep_good no_timer_check"  # a busy host is late with the timer that is checked
KVM_KERNEL_DEADLINE_S = 15.0  # where KVM works, the guest's first process runs within two seconds
KVM_CREATE_VM = 0xAE01
END_DEADLINE_S = 10.0
MOST_GUESTS = 3
RUNNING_IN_RXE = re.compile(r"RIP: 0010:([\w.]+)\+0x[0-9a-f]+/0x[0-9a-f]+ \[rdma_rxe\]")
KEPT_LINES = 60  # of each console, to be shown when a guest fails


@dataclass(frozen=True)
class Options:
    """Of every guest. `out` is a folder of this host, writable in all guests as /out."""

    repository: Path
    cache: Path
    out: Path
    memory_mib: int = 2048
    cpus: int = 1
    nics: int = 1  # of each guest, all on the one network
    boot_deadline_s: float = 180.0
    accelerator: str = ""  # "kvm" or "tcg"; otherwise KVM where it works


class GuestFailed(Exception):
    """A guest did not boot, or went away; the last lines of its console are in the text."""


def panic_in_rxe(console: Iterable[str]) -> str:
    """The function of rdma_rxe in which a kernel panicked, from the last lines of its console. Empty: no such panic."""
    where = ""
    for line in console:
        if "RIP: 0010:" in line:  # a panic follows the registers that it is about
            inside = RUNNING_IN_RXE.search(line)
            where = inside[1] if inside else ""
        if "Kernel panic - not syncing" in line:
            return where
    return ""


def address(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


class Guest:
    """One qemu process. What its console says is printed line by line, after the guest's name."""

    def __init__(self, index: int, argv: list[str], nonce: str, changed: threading.Condition) -> None:
        self.index, self.name = index, f"vm{index}"
        self.runs_kernel = self.is_ready = self.is_gone = False
        self.exit_code: int | None = None  # of its command
        self.reason = ""
        self._nonce, self._changed = nonce, changed
        self._console: deque[str] = deque(maxlen=KEPT_LINES)
        self._started = time.monotonic()
        # A session of its own: Ctrl-C on a terminal reaches only this process, which then ends the guests.
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"console of {self.name}", daemon=True)
        self._reader.start()

    @property
    def was_lost(self) -> bool:
        """It went away and its command had not ended."""
        return self.exit_code is None and (self.is_gone or bool(self.reason))

    def console(self) -> str:
        return "\n".join(f"{self.name}| {line}" for line in self._console)

    def panic_in_rxe(self) -> str:
        return panic_in_rxe(list(self._console))

    def kill(self) -> None:
        """End it as a power cut does."""
        self.process.kill()
        self.process.wait(END_DEADLINE_S)
        self._reader.join(END_DEADLINE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip("\r\n")
            _, ours, said = line.partition(self._nonce + " ")
            if ours:
                self._hear(*said.split(maxsplit=1))
            else:
                self._console.append(line)
                print(f"{self.name}| {line}", flush=True)
        with self._changed:
            self.is_gone = True
            self._changed.notify_all()

    def _hear(self, word: str, rest: str = "") -> None:
        with self._changed:
            self.runs_kernel = True
            if word == "ready":
                self.is_ready = True
                print(f"{self.name} booted after {time.monotonic() - self._started:.1f} s", flush=True)
            elif word == "exit":
                self.exit_code = int(rest)
            elif word == "failed:":
                self.reason = rest
            self._changed.notify_all()


class Guests:
    """The guests of one network. `commands` are run by a shell, as root, in the repository: one guest for each."""

    def __init__(self, commands: Sequence[str], files: GuestFiles, options: Options) -> None:
        self._commands, self._files, self._options = commands, files, options
        self._changed = threading.Condition()
        self.all: list[Guest] = []

    def boot(self, folder: Path, accelerator: str) -> bool:
        """Start them and wait until all are ready; their sockets are in `folder`. False if KVM runs no kernel."""
        print(f"booting {len(self._commands)} guest(s) under {accelerator}", flush=True)
        nonce = secrets.token_hex(8)
        for index, command in enumerate(self._commands):
            settings = {
                "NONCE": nonce,
                "FLYBALL_VM": str(index),
                "FLYBALL_VM_ADDRESSES": ",".join(address(other) for other in range(len(self._commands))),
                "ADDRESS": address(index),
                "REPOSITORY": str(self._options.repository),
                "COMMAND": command,
            }
            archive = folder / f"initramfs-{index}"
            archive.write_bytes(initramfs(self._files, settings))
            self.all.append(Guest(index, self._argv(index, archive, folder, accelerator), nonce, self._changed))
        if accelerator == "kvm":
            self._wait(lambda: all(guest.runs_kernel or guest.is_gone for guest in self.all), KVM_KERNEL_DEADLINE_S)
            if not all(guest.runs_kernel for guest in self.all):
                return False
        deadline_s = self._options.boot_deadline_s
        self._wait(lambda: all(g.is_ready for g in self.all) or any(g.was_lost for g in self.all), deadline_s)
        for guest in sorted(self.all, key=lambda guest: not guest.was_lost):
            if guest.was_lost or not guest.is_ready:
                why = guest.reason or ("qemu ended" if guest.is_gone else f"not ready after {deadline_s:.0f} s")
                raise GuestFailed(f"{guest.name} did not boot: {why}\n{guest.console()}")
        print("running", flush=True)
        return True

    def wait(self, guests: Sequence[Guest], deadline_s: float) -> None:
        """Until the commands of these have ended. Raises TimeoutError, and GuestFailed if one was lost before."""
        ended = self._wait(
            lambda: any(g.was_lost for g in guests) or all(g.exit_code is not None for g in guests), deadline_s
        )
        for guest in guests:
            if guest.was_lost:
                raise GuestFailed(f"{guest.name} went away before its command ended {guest.reason}\n{guest.console()}")
        if not ended:
            names = ", ".join(guest.name for guest in guests if guest.exit_code is None)
            raise TimeoutError(f"the command did not end within {deadline_s:.0f} s in {names}")

    def end(self) -> None:
        while self.all:
            self.all.pop().kill()

    def _wait(self, is_so: Callable[[], bool], deadline_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(is_so, deadline_s)

    def _argv(self, index: int, archive: Path, folder: Path, accelerator: str) -> list[str]:
        options = self._options
        argv = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []  # it ends with this process
        argv += [QEMU, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
        kernel_parameters = KERNEL_PARAMETERS
        if accelerator == "kvm":
            argv += ["-machine", "q35", "-accel", "kvm", "-cpu", "host"]
        else:
            argv += ["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", EMULATED_CPU]
            kernel_parameters += EMULATED_PARAMETERS
        argv += ["-smp", str(options.cpus), "-m", str(options.memory_mib)]
        argv += ["-kernel", str(self._files.kernel), "-initrd", str(archive), "-append", kernel_parameters]
        argv += ["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]
        shares = (("host", "/", "on"), ("packages", self._files.packages, "on"), ("out", options.out, "off"))
        for name, path, readonly in shares:
            share = f"local,id={name},path={path},security_model=none,multidevs=remap,readonly={readonly}"
            argv += ["-fsdev", share, "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
        return argv + self._network(index, folder)

    def _network(self, index: int, folder: Path) -> list[str]:
        """A wire joins two guests with one interface each. Otherwise each has a hub, and vm0's joins all others."""
        guests = max(2, len(self._commands))
        others = range(1, guests) if index == 0 else (0,)
        wires = {f"to{other}": _wire(folder, index, other) for other in others}
        if guests == 2 and self._options.nics == 1:
            ((name, wire),) = wires.items()
            return ["-netdev", f"{wire},id={name}", *_nic(index, 0, name)]
        argv: list[str] = []
        for name, wire in wires.items():
            argv += ["-netdev", f"{wire},id={name}", "-netdev", f"hubport,id=hub-{name},hubid=0,netdev={name}"]
        for nic in range(self._options.nics):
            argv += ["-netdev", f"hubport,id=net{nic},hubid=0", *_nic(index, nic, f"net{nic}")]
        return argv


def _wire(folder: Path, own: int, other: int) -> str:
    here, there = folder / f"net-{own}-{other}", folder / f"net-{other}-{own}"
    return f"dgram,local.type=unix,local.path={here},remote.type=unix,remote.path={there}"


def _nic(index: int, number: int, netdev: str) -> tuple[str, str]:
    return "-device", f"virtio-net-pci,netdev={netdev},romfile=,mac=52:54:00:77:{number:02x}:{index + 1:02x}"


@contextmanager
def running(commands: Sequence[str], options: Options) -> Iterator[Guests]:
    """Boot a guest per command, at most three; they are ended with the block. Raises Unavailable, GuestFailed."""
    if not 1 <= len(commands) <= MOST_GUESTS:
        raise ValueError(f"one to {MOST_GUESTS} guests, not {len(commands)}")
    if shutil.which(QEMU) is None:
        raise Unavailable(f"no {QEMU}: apt-get install qemu-system-x86")
    files = guest_files(options.cache)
    guests = Guests(commands, files, options)
    with tempfile.TemporaryDirectory(prefix="flyball-vm-") as folder:
        try:
            accelerator = options.accelerator or ("kvm" if _kvm_makes_machines() else "tcg")
            if not guests.boot(Path(folder), accelerator):
                print("KVM does not run this kernel here: emulating instead", flush=True)
                guests.end()
                guests.boot(Path(folder), "tcg")
            yield guests
        finally:
            guests.end()


def _kvm_makes_machines() -> bool:
    try:
        device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.close(fcntl.ioctl(device, KVM_CREATE_VM, 0))
    except OSError:
        return False
    finally:
        os.close(device)
    return True
