"""Faults of the wall clock, of processes that were started with one of their own: a library that shifts what they read,
by the nanoseconds in a file. Linux has one wall clock for the whole machine, also with time namespaces."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import ClassVar

from flyball.contracts.errors import ConfigurationError, NotFound, UsageError
from flyball.state_folder import clear_errors, make_folder
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.kinds.services import SERVICE, service_process
from simulator.inject.processes import LiveProcess, environment_of

WALL_CLOCK = "FLYBALL_WALL_CLOCK"  # the file
SOURCE = Path(__file__).with_name("wall_clock.c")
LIBRARY = "wall_clock.so"
OFFSET = struct.Struct("=q")
NS = 1_000_000_000
BUILD_TIMEOUT_S = 60.0
SEPARATORS = re.compile(r"[\s:]")  # of LD_PRELOAD
LARGEST_S = 10 * 365 * 86_400.0
SECONDS = Option("seconds", 3_600.0, "by which the clock jumps; less than 0: back")


def make_clock(folder: Path, preload: str = "") -> dict[str, str]:
    """Build a wall clock in a folder; returns the environment of processes that are to have it. What is there already
    stays as it is, unless the source is newer. `preload`: the LD_PRELOAD that they have without it, which is kept.
    Raises ConfigurationError, and UsageError for a folder that LD_PRELOAD cannot name."""
    folder = folder.resolve()
    if SEPARATORS.search(str(folder)):
        raise UsageError(f"The folder {folder} has a blank or colon in its path.", hint="choose another folder")
    library, offset = folder / LIBRARY, folder / "wall_clock.offset"
    with clear_errors(offset):
        make_folder(folder)
        if not offset.exists():
            offset.write_bytes(OFFSET.pack(0))
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        _build(library)
    others = [name for name in SEPARATORS.split(preload) if name and Path(name).name != LIBRARY]
    return {"LD_PRELOAD": ":".join([str(library), *others]), WALL_CLOCK: str(offset)}


def _build(library: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        raise ConfigurationError("There is no C compiler (cc).", hint="install one, for example Debian's gcc")
    new = library.with_suffix(".new")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(new), str(SOURCE), "-ldl"]
    try:
        built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"The clock was not built within {BUILD_TIMEOUT_S:.0f} s.", hint="try again when the machine is less busy"
        ) from error
    if built.returncode:
        raise ConfigurationError(
            f"The clock could not be built: {built.stderr.strip()[-500:]}.", hint="see that cc can build for glibc"
        )
    new.rename(library)


class _ClockJump(RealFault):
    options: ClassVar[tuple[Option, ...]] = (SECONDS,)
    lasts_s = 30.0

    def process(self, site: FaultSite) -> LiveProcess | None:
        raise NotImplementedError

    def lacks(self, site: FaultSite) -> str:
        process = self.process(site)
        if process is not None and not _clock_of(process):
            return "it has no clock of its own; start it with `env $(flyball inject clock FOLDER) ...`"
        return ""

    def plan(self, site: FaultSite) -> Plan:
        process = self.process(site)
        path = _clock_of(process) if process is not None else ""
        if not path:
            raise NotFound("Its clock was not found: the process does not run.", hint="start it, then try again")
        seconds = site.number("seconds")
        if not 0 < abs(seconds) <= LARGEST_S:
            raise UsageError("seconds must not be 0, nor more than ten years.", hint="for example seconds=-3600")
        if _read(path):
            raise NotFound("That clock is off already.", hint="wait until the earlier fault is over")
        return {"path": path, "offset_ns": int(seconds * NS)}

    def inject(self, plan: Plan) -> None:
        _write(plan["path"], plan["offset_ns"])

    def undo(self, plan: Plan) -> None:
        if Path(plan["path"]).exists() and _read(plan["path"]) == plan["offset_ns"]:
            _write(plan["path"], 0)


class ClockJump(_ClockJump):
    name = "clock-jump"
    about = "the wall clock of a host's processes jumps, and back at the end"
    target = FaultTarget.HOST
    options = (SECONDS,)

    def process(self, site: FaultSite) -> LiveProcess | None:
        return site.host.daemon()


class ServiceClockJump(_ClockJump):
    name = "service-clock-jump"
    about = "the wall clock of a service of the control plane jumps, and back at the end"
    target = FaultTarget.SERVICE
    options = (SERVICE, SECONDS)

    def process(self, site: FaultSite) -> LiveProcess | None:
        return service_process(site)


def _clock_of(process: LiveProcess) -> str:
    """The file of a process's clock, '' if it has none."""
    environment = environment_of(process)
    preloaded = SEPARATORS.split(environment.get("LD_PRELOAD", ""))
    has_one = any(Path(name).name == LIBRARY for name in preloaded)
    return environment.get(WALL_CLOCK, "") if has_one else ""


def _read(path: str) -> int:
    return int(OFFSET.unpack(Path(path).read_bytes())[0])


def _write(path: str, offset_ns: int) -> None:
    """In place: processes have the file mapped."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(descriptor, OFFSET.pack(offset_ns), 0)
    finally:
        os.close(descriptor)
