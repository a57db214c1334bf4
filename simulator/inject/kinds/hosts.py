"""Faults of a whole host: lost, rebooted, announced to be taken away, with a bad GPU, with a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import msgspec

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import NotFound, UsageError
from flyball.contracts.identity import check_name
from flyball.contracts.reports.conditions import ConditionRequest, Severity
from flyball.state_folder import clear_errors, write_private
from simulator.inject.faults import kill_all, remove_host, write_notice
from simulator.inject.host_files import CONDITIONS_FOLDER, PREEMPTION_NOTICE, HostFiles, state_dir_of
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.kinds.namespaces import held_open, is_apart, namespace_of
from simulator.inject.kinds.phases import NAMES, phase_of, wait_for_phase
from simulator.inject.processes import LiveProcess, environment_of, own_processes

TIED = "flyball.cli.run.tied"  # a daemon that ends with the command that started it
SPARE_BYTES = 1 << 20
_MOST_NOTICE_S = 86_400.0  # what a daemon reads from a notice


class HostDown(RealFault):
    name = "host-down"
    about = "the loss of a machine: all its processes are killed, its shared memory and state folder removed"
    target = FaultTarget.HOST
    causes: ClassVar[tuple[str, ...]] = ("host_silent",)

    def plan(self, site: FaultSite) -> Plan:
        return {"state_dir": str(site.host.root), "prefix": str(site.host.segment_prefix())}

    def inject(self, plan: Plan) -> None:
        files = HostFiles(Path(plan["state_dir"]))
        kill_all(files, SystemClock())
        remove_host(files, Path(plan["prefix"]))


class HostReboot(HostDown):
    name = "host-reboot"
    about = "the same, and the daemon starts again at once, under its name and with nothing of before"
    causes = ("host_silent", "host_restarted", "worker_killed")

    def lacks(self, site: FaultSite) -> str:
        daemon = site.host.daemon()
        if daemon is not None and TIED in daemon.argv:
            return "its daemon ends with the command that started it; start it with `flyball host`"
        if daemon is not None and not Path(f"/proc/{daemon.pid}/cmdline").read_bytes().endswith(b"\0"):
            return "its daemon's title has cut off its command line, so it cannot be started again"
        return ""

    def plan(self, site: FaultSite) -> Plan:
        daemon = site.host.daemon()
        if daemon is None:
            raise NotFound(f"The daemon of {site.host_id} does not run.", hint="start it, then try again")
        again = start_plan(daemon, "host_daemon")
        return super().plan(site) | again | {"token": _own_token(daemon.argv, site.host.root)}

    def inject(self, plan: Plan) -> None:
        with held_open(plan["namespace"]) as namespace:  # it may end with the host's last process
            if namespace is None:
                raise _namespace_is_gone("nothing was done")
            super().inject(plan)
            self._start(plan, namespace)

    def undo(self, plan: Plan) -> None:
        with held_open(plan["namespace"]) as namespace:
            self._start(plan, namespace)

    def _start(self, plan: Plan, namespace: int | None) -> None:
        folder = Path(plan["state_dir"])
        if any("host_daemon" in p.argv and state_dir_of(p) == folder for p in own_processes()):
            return
        for name, token in plan["token"].items():  # it came from elsewhere, and would again
            Path(name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(Path(name), token.encode(), durable=False)
        start_again(plan, folder.with_name(f"{folder.name}.rebooted.log"), namespace)


def command_of(argv: Sequence[str], module: str) -> list[str]:
    """The command that starts a process of Flyball again. It may have put a title before its arguments, which no longer
    name the interpreter; the injector's own is the same installation's."""
    if module not in argv:
        return list(argv)
    return [sys.executable, "-P", "-m", *argv[list(argv).index(module) :]]


def start_plan(process: LiveProcess, module: str) -> Plan:
    """What `start_again` needs to start a process."""
    return {
        "argv": command_of(process.argv, module),
        "cwd": str(Path(f"/proc/{process.pid}/cwd").readlink()),
        "environment": environment_of(process),
        "namespace": namespace_of(process.pid),
    }


def start_again(plan: Plan, log_path: Path, namespace: int | None) -> None:
    """Start a process as it was started, in a session of its own and in its network namespace, of which this is a
    descriptor. Raises NotFound if that is gone (None)."""
    if namespace is None:
        raise _namespace_is_gone("it was not started again")
    inside = ("nsenter", f"--net=/proc/self/fd/{namespace}") if is_apart(plan["namespace"]) else ()
    with log_path.open("ab") as log:
        subprocess.Popen(
            [*inside, *plan["argv"]],
            pass_fds=(namespace,) if inside else (),
            cwd=plan["cwd"] if Path(plan["cwd"]).is_dir() else "/",  # it may have been removed since
            env=plan["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _namespace_is_gone(outcome: str) -> NotFound:
    return NotFound(
        f"The network namespace is gone: {outcome}.",
        hint="make it again and start the process by hand; then run `flyball inject undo`",
    )


def _own_token(argv: tuple[str, ...], folder: Path) -> dict[str, str]:
    """The token file, if it is inside the folder that is removed: its path and content."""
    given = dict(pairwise(argv)).get("--token-file", "")
    path = Path(given) if given else folder
    inside = path.is_file() and folder in path.resolve().parents
    return {str(path): path.read_text()} if inside else {}


class Preempt(RealFault):
    name = "preempt"
    about = "a notice that the host will be taken away, at once or in a phase of a rank on it; nothing is taken away"
    target = FaultTarget.HOST
    options = (Option("deadline_s", 30.0, "seconds of notice"), Option("phase", "any", f"any, {', '.join(NAMES)}"))
    causes = ("preemption_notice",)
    lasts_s = 60.0

    def plan(self, site: FaultSite) -> Plan:
        if not 0 < site.number("deadline_s") <= _MOST_NOTICE_S:
            raise UsageError("deadline_s must be above 0, and at most a day.", hint="for example deadline_s=30")
        phase, path = site.text("phase"), site.host.root / PREEMPTION_NOTICE
        _check_no_notice(path)
        return {
            "path": str(path),
            "source": f"flyball inject {site.injection_id}",
            "deadline_s": site.number("deadline_s"),
            "prefix": str(site.host.segment_prefix()),
            "phase": None if phase == "any" else int(phase_of(phase)),
        }

    def inject(self, plan: Plan) -> float:
        path = Path(plan["path"])
        if plan["phase"] is not None:
            wait_for_phase(HostFiles(path.parent), plan["prefix"], Phase(plan["phase"]))
        _check_no_notice(path)  # of meanwhile
        write_notice(path, float(plan["deadline_s"]), plan["source"])
        return path.stat().st_mtime

    def undo(self, plan: Plan) -> None:
        """Unless somebody else's notice is there."""
        path = Path(plan["path"])
        with suppress(FileNotFoundError):
            if f'"{plan["source"]}"'.encode() in path.read_bytes():
                path.unlink(missing_ok=True)


def _check_no_notice(path: Path) -> None:
    if path.exists():
        raise NotFound(f"There is a notice in {path} already: nothing was done.", hint="if it is an old one, remove it")


class Condition(RealFault):
    name = "condition"
    about = "a report, as of a monitor, that something is wrong with the host; the hardware is left alone"
    target = FaultTarget.HOST
    options = (
        Option("kind", "gpu-lost", "what is wrong"),
        Option("severity", "critical", "info, warning or critical"),
    )
    lasts_s = 30.0
    causes = ("host_condition",)

    def plan(self, site: FaultSite) -> Plan:
        kind = check_name("The kind", site.text("kind"))
        try:
            severity = Severity(site.text("severity"))
        except ValueError as error:
            raise UsageError("There is no such severity.", hint="severity=info, warning or critical") from error
        said = ConditionRequest(kind, severity, f"flyball inject reported {kind}.")
        path = site.host.root / CONDITIONS_FOLDER / f"injected-{site.injection_id}.json"
        return {"path": str(path), "said": msgspec.to_builtins(said)}

    def inject(self, plan: Plan) -> None:
        path = Path(plan["path"])
        with clear_errors(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(path, msgspec.json.encode(plan["said"]), durable=False)

    def undo(self, plan: Plan) -> None:
        Path(plan["path"]).unlink(missing_ok=True)


class DiskFull(RealFault):
    name = "disk-full"
    about = "the file system of the host's state folder is filled up"
    target = FaultTarget.HOST
    options = (Option("max_gib", 4.0, "never write more than this"),)
    lasts_s = 30.0

    def lacks(self, site: FaultSite) -> str:
        folder = site.host.root
        if not (os.path.ismount(folder) or os.path.ismount(folder.parent)) or _device(folder) == _device(Path("/")):
            return "its state folder is on a file system that others use; give it one of its own (a mount point)"
        return ""

    def plan(self, site: FaultSite) -> Plan:
        free_bytes = _free_bytes(site.host.root)
        limit_bytes = int(site.number("max_gib") * (1 << 30))
        if free_bytes > limit_bytes:
            raise UsageError(
                f"{free_bytes >> 20} MiB are free on that file system, and max_gib allows {limit_bytes >> 20} MiB.",
                hint="give max_gib=..., or a smaller file system",
            )
        return {"path": str(site.host.root / f"filler-{site.injection_id}")}

    def inject(self, plan: Plan) -> None:
        path = Path(plan["path"])
        with path.open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(b"\0" * SPARE_BYTES)
            except OSError:
                pass  # it is full, as wanted

    def undo(self, plan: Plan) -> None:
        Path(plan["path"]).unlink(missing_ok=True)


def _device(path: Path) -> int:
    return path.stat().st_dev


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
