"""Whether slots can have transparent huge pages (2 MiB in place of 4 KiB): that is up to the mount that they are on."""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

_log = logging.getLogger("flyball.engine")

_SYSTEM_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MOUNTS = Path("/proc/self/mountinfo")
_ALLOWING = ("advise", "always", "within_size")


@functools.cache
def are_allowed(directory: str) -> bool:
    """Whether files in `directory` get huge pages when they ask for them; says once in the log why not."""
    reason = why_not(directory, os.fsdecode(_MOUNTS.read_bytes()), _system_switch())
    if reason:
        _log.warning("the slots have ordinary pages: %s", reason)
    return not reason


def why_not(directory: str, mounts: str, system_switch: str) -> str:
    """'' if a file in `directory` can have huge pages, else the reason and what would help. `mounts` is the text of
    /proc/self/mountinfo, `system_switch` the chosen word of .../transparent_hugepage/shmem_enabled ('' without it)."""
    if system_switch in ("", "deny"):
        return "this kernel has no transparent huge pages for shared memory, or denies them"
    mount = _mount_of(os.path.realpath(directory), mounts)
    if mount is None:
        return f"no mount of {directory} was found"
    point, file_system, options = mount
    if file_system != "tmpfs":
        return f"{directory} is on {file_system}, not on a tmpfs"
    chosen = next((option.removeprefix("huge=") for option in options if option.startswith("huge=")), "never")
    if chosen in _ALLOWING or system_switch == "force":
        return ""
    return f"{point} is mounted without them; `mount -o remount,huge=advise {point}` allows them"


def _mount_of(directory: str, mounts: str) -> tuple[str, str, list[str]] | None:
    """The mount that a folder is on: its mount point, file system and options of the file system."""
    best: tuple[str, str, list[str]] | None = None
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])  # \040 for a space
        if directory == point or directory.startswith(point.rstrip("/") + "/"):
            kind, _, options = rest.split(" ", 2)  # in the middle is the source, which may be empty
            if best is None or len(point) >= len(best[0]):  # of several on one point the last one counts
                best = point, kind, options.split(",")
    return best


def _system_switch() -> str:
    try:
        words = _SYSTEM_SWITCH.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")
