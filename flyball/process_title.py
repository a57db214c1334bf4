"""What `ps` shows of our processes: `flyball: host daemon node-7: host_daemon --state-dir ...`.

The words behind the label are the command line as it was, so that whoever looks for a script, a module or a state
folder goes on finding it. setproctitle writes over the command line in place, and would go on over the environment
behind it. It must not: what cleans up after jobs (Slurm, Jenkins, our own tests) finds processes by /proc/PID/environ.
So a title is cut where the command line ended, and a process that needs a longer one has TITLE_ROOM as its last word.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PREFIX: Final = "flyball: "
TITLE_ROOM: Final = " " * 1000
_KEEP_ENVIRONMENT: Final = "SPT_NOENV"  # setproctitle reads it once, at its first call


def set_title(label: str, words: Sequence[str]) -> None:
    """Name this process, and those that it forks."""
    words = [word for word in words if word != TITLE_ROOM]
    os.environ[_KEEP_ENVIRONMENT] = "1"
    try:
        from setproctitle import setproctitle

        setproctitle(f"{PREFIX}{label}: {shlex.join(words)}")
    except ImportError:  # a platform that it is not built for: ps shows the command line, and all else works
        return
    finally:
        del os.environ[_KEEP_ENVIRONMENT]
    with contextlib.suppress(OSError):  # some containers mount /proc read-only
        # `ps -C python`, `top` and `killall` go by this name, which setproctitle changed too
        Path("/proc/self/comm").write_text(Path(sys.executable).name[:15])


def words_of(cmdline: bytes) -> list[str]:
    """The words of a /proc/PID/cmdline, be it a command line or a title of ours."""
    text = cmdline.rstrip(b"\0").decode(errors="replace")
    if not text.startswith(PREFIX):
        return text.split("\0")
    try:
        return shlex.split(text)
    except ValueError:  # it was cut within quotes
        return text.split()


def read_words(pid: int) -> list[str]:
    """Those of a process. Raises OSError if it has ended, or is not ours to look at."""
    return words_of(Path(f"/proc/{pid}/cmdline").read_bytes())
