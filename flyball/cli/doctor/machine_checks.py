"""What `flyball doctor` says about this machine: its memory, its disk, its clock, and what its kernel allows."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ckpt_engine.rules.memory_plan import MemoryPlan, readable_size
from ckpt_engine.slots.memory_limits import available_memory
from flyball.cli.doctor.findings import CheckedHost, Finding, not_here, ok, warning
from flyball.cli.reach.places import state_root
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE
from flyball.state_folder import clear_errors
from flyball.worker_user import find_worker_user
from host_daemon.probes.host_needs import check_disk, check_shm
from services.runtime.process import OPEN_FILES, raised_open_files

ADAM_BYTES: Final = 12  # of a parameter and its two moments, in float32
SHM_SHARE: Final = 0.25  # of the machine's memory; a tmpfs has half of it by default, a container 64 MiB
FREE_BYTES: Final = 1 << 30  # for the database, the logs, and the disk tier of a small job
FEW_FILES: Final = 4_096
_TIME_ERROR: Final = 5  # of adjtimex: the clock is not synchronised
_TIMEX_BYTES: Final = 256  # more than the struct has
_MAX_ERROR_AT: Final = 24  # its `maxerror`, in microseconds
_PY_SPY_TIMEOUT_S: Final = 10.0
KEPT_SHOWN: Final = 4  # jobs
_SLOT: Final = re.compile(r"(?P<prefix>flyball-[0-9a-f]{10})\.(?P<job>.+)\.[rp]\d+\.s\d+")


def shared_memory(host: CheckedHost) -> Iterator[Finding]:
    """Room for the slots, by what limits it, and the state that it is enough for."""
    folder = host.environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR
    check_shm(Path(folder))
    what, size_bytes = min(available_memory(folder).items(), key=lambda limit: limit[1])
    yield memory_finding(folder, what, size_bytes, shutil.disk_usage(folder).total, _memory_bytes(host))
    if (kept := kept_memory(Path(folder), host.procfs)) is not None:
        yield kept


def kept_memory(folder: Path, procfs: Path) -> Finding | None:
    """The slots of jobs that no process uses, None if there are none: a job that failed, or was killed, keeps its
    newest steps there until somebody resumes it on this machine."""
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for path in folder.glob("flyball-*"):
        if name := _SLOT.fullmatch(path.name):
            with suppress(FileNotFoundError):
                sizes[name["prefix"], name["job"]] += path.lstat().st_blocks * 512
    used = _used_prefixes(folder, procfs) if sizes else set()
    kept: dict[str, int] = defaultdict(int)
    for (prefix, job), size_bytes in sizes.items():
        if prefix not in used and size_bytes:
            kept[job] += size_bytes
    if not kept:
        return None
    largest = sorted(kept, key=lambda job: -kept[job])
    named = ", ".join(f"{job} ({readable_size(kept[job])})" for job in largest[:KEPT_SHOWN])
    more = f" and {len(kept) - KEPT_SHOWN} more" if len(kept) > KEPT_SHOWN else ""
    return warning(
        "kept memory",
        f"{readable_size(sum(kept.values()))} in {folder} are steps of jobs that do not run here: {named}{more}",
        f"resume them, or free it: flyball ckpt rm --job {largest[0]} --memory (in a batch system's epilog, too)",
    )


def _used_prefixes(folder: Path, procfs: Path) -> set[str]:
    """The prefixes of segments that some process has open or mapped, as far as this user may see."""
    used: set[str] = set()
    for process in procfs.glob("[0-9]*"):
        with suppress(OSError):
            names = [str(link.readlink()) for link in (process / "fd").iterdir()]
            names += (process / "maps").read_text(errors="replace").splitlines()
            for name in names:
                if (at := name.find(f"{folder}/flyball-")) >= 0:
                    used.add(name[at + len(str(folder)) + 1 :].partition(".")[0])
    return used


def memory_finding(folder: str, what: str, free_bytes: int, total_bytes: int, memory_bytes: int) -> Finding:
    """`free_bytes`: as limited by `what`. `total_bytes`: of the folder's file system; `memory_bytes`: the machine's."""
    room = free_bytes // MemoryPlan(1).total_bytes
    detail = (
        f"{readable_size(free_bytes)} free for checkpoints, limited by {what}: two slots of {readable_size(room)} per "
        f"host, the state of {room / ADAM_BYTES / 1e6:,.0f} million parameters with Adam in float32"
    )
    if total_bytes < SHM_SHARE * memory_bytes and total_bytes <= 2 * free_bytes:
        mend = f"mount -o remount,size={memory_bytes >> 31 or 1}G {folder}; Docker: --shm-size; or set FLYBALL_SHM_DIR"
        return warning("shared memory", f"{folder} has {readable_size(total_bytes)} in all. {detail}", mend)
    return ok("shared memory", detail)


def _memory_bytes(host: CheckedHost) -> int:
    lines = (host.procfs / "meminfo").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), 0)


def state_folder(host: CheckedHost) -> Iterator[Finding]:
    """The folder that Flyball would make its state folders in; nothing is made."""
    root = state_root(host.environ)
    folder = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    hint = "set FLYBALL_STATE_DIR to a folder that you may write to"
    with clear_errors(root, hint=hint), tempfile.TemporaryFile(dir=folder):
        pass
    check_disk(folder)
    free_bytes = shutil.disk_usage(folder).free
    detail = f"{root} is writable, {readable_size(free_bytes)} free"
    if free_bytes < FREE_BYTES:
        yield warning("state folder", detail, "free space there, or set FLYBALL_STATE_DIR to a folder on another disk")
    else:
        yield ok("state folder", detail)


def open_files(_: CheckedHost) -> Iterator[Finding]:
    """How many files a process may open: a supervisor has a connection per host, an engine some per peer."""
    yield files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))


def files_finding(now: int, most: int) -> Finding:
    """`now` and `most`: the soft and the hard limit; services raise the first themselves."""
    infinite = resource.RLIM_INFINITY
    raised = raised_open_files(now, most)
    if most != infinite and most < FEW_FILES:
        mend = f"LimitNOFILE={OPEN_FILES} in the systemd unit; Docker: --ulimit nofile={OPEN_FILES}; else limits.conf"
        return warning("open files", f"at most {most:,} may be open: too few for a large cluster's supervisor", mend)
    return ok("open files", f"{'unlimited' if raised == infinite else f'{raised:,}'} may be open")


def clock(_: CheckedHost) -> Iterator[Finding]:
    """Whether the kernel's clock is synchronised. It is only read."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    if state < 0:
        yield not_here("clock", f"the kernel does not say: {os.strerror(ctypes.get_errno())}")
    else:
        yield clock_finding(state, struct.unpack_from("@l", buffer, _MAX_ERROR_AT)[0])


def clock_finding(state: int, max_error_us: int) -> Finding:
    """`state`: what adjtimex returns."""
    if state != _TIME_ERROR:
        return ok("clock", f"synchronised, to {max_error_us / 1000:,.0f} ms or better")
    detail = "the kernel's clock is not synchronised: times of this host may differ from others'"
    return warning("clock", detail, "timedatectl set-ntp true; or install chrony; in a container or VM: on its host")


def stacks(host: CheckedHost) -> Iterator[Finding]:
    """Whether py-spy can read another process, as a daemon does with a rank that hangs. Without it, the rank is asked
    by a signal, which one that is stuck in a C extension does not answer."""
    py_spy = shutil.which("py-spy", path=host.environ.get("PATH"))
    if py_spy is None:
        yield ok("stacks", "by a signal; with py-spy (pip install py-spy) also of ranks that are stuck in C code")
        return
    program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has started
            line = [py_spy, "dump", "--nonblocking", "--pid", str(process.pid)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=_PY_SPY_TIMEOUT_S, check=False)
            code, error = done.returncode, done.stderr.strip()
        except subprocess.TimeoutExpired:
            code, error = 1, f"it did not answer within {_PY_SPY_TIMEOUT_S:g} s"
        finally:
            process.kill()
    if code == 0:
        yield ok("stacks", f"{py_spy} can read other processes")
    else:
        scope = host.procfs / "sys/kernel/yama/ptrace_scope"
        about = f" (kernel.yama.ptrace_scope = {scope.read_text().strip()})" if scope.exists() else ""
        mend = "sysctl -w kernel.yama.ptrace_scope=0; in a container: --cap-add SYS_PTRACE"
        detail = f"py-spy cannot read other processes{about}: {(error.splitlines() or ['no reason'])[0]}"
        yield warning("stacks", f"{detail}. Stacks are taken by a signal", mend)


def cgroup(host: CheckedHost) -> Iterator[Finding]:
    """The version of control groups, which count kills for lack of memory, and show a container's pressure."""
    folder = host.sysfs / "fs/cgroup"
    if (folder / "cgroup.controllers").exists():
        yield ok("cgroup", "version 2")
    elif (folder / "memory").is_dir():
        mend = "boot with systemd.unified_cgroup_hierarchy=1"
        yield warning("cgroup", "version 1: the memory and CPU pressure of a container is not seen", mend)
    else:
        yield not_here("cgroup", f"{folder} has no control groups")


def worker_user(host: CheckedHost) -> Iterator[Finding]:
    """Whether scripts would run as the daemon's user, and what that leaves open."""
    name = host.environ.get("FLYBALL_WORKER_USER", "")
    if name:
        user = find_worker_user(name)
        yield ok("worker user", f"workers run as {user.name if user else name}, and cannot reach daemon and engine")
        return
    detail = (
        "workers run as the daemon's user: a script could end the daemon and the engine by a signal, read this host's "
        "token, and change files of other jobs"
    )
    if os.geteuid() == 0:
        yield warning("worker user", detail, "flyball host --worker-user NAME, or FLYBALL_WORKER_USER")
    else:
        yield ok("worker user", f"{detail}. `flyball host --worker-user NAME` prevents it where the daemon is root")
