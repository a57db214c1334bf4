"""What a benchmark that was killed left behind: its folders say whose they are, and its engines' slots follow from
their names."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from flyball.contracts.on_host.segments import shm_prefix

_FOLDER = re.compile(r"fbb-([0-9]+)-.+")


def folder_prefix() -> str:
    """Of the names of this process's folders; short, since a Unix socket's path is limited."""
    return f"fbb-{os.getpid()}-"


def segments_of(state_dir: Path) -> list[Path]:
    """The files in shared memory of the engine with this state folder, and of no other."""
    prefix = Path(shm_prefix(str(state_dir.resolve())))
    return sorted(prefix.parent.glob(prefix.name + ".*"))


def remove_leftovers(folder: Path) -> None:
    """Remove what processes of this user that are gone made below `folder`, and the slots of their engines."""
    for found in folder.glob("fbb-*-*"):
        named = _FOLDER.fullmatch(found.name)
        if named is None or _is_alive(int(named[1])) or found.lstat().st_uid != os.getuid():
            continue
        for state_dir in found.iterdir():
            for segment in segments_of(state_dir):
                segment.unlink(missing_ok=True)
        shutil.rmtree(found, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(") ")[2][:1] not in ("Z", "X")  # one that nobody has waited for yet is dead all the same
