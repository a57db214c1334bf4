"""Process titles, as `ps` shows them: `flyball: host daemon node-7: host_daemon --state-dir ...`.

After the label comes the original command line, so that searches for a script, a module or a state folder still match.
setproctitle overwrites the command line in place, and would continue over the environment behind it. It must not: tools
that clean up after jobs (Slurm, Jenkins, our own tests) find processes by /proc/PID/environ. So a title is cut where
the command line ended. A process that needs a longer one gets TITLE_ROOM as its last word.
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
    """Set the title of this process and of those that it forks."""
    words = [word for word in words if word != TITLE_ROOM]
    os.environ[_KEEP_ENVIRONMENT] = "1"
    try:
        from setproctitle import setproctitle

        setproctitle(f"{PREFIX}{label}: {shlex.join(words)}".encode(errors="backslashreplace").decode())
    except ImportError:  # not built for this platform: ps shows the command line
        return
    finally:
        del os.environ[_KEEP_ENVIRONMENT]
    with contextlib.suppress(OSError):  # some containers mount /proc read-only
        # setproctitle changes this name too, which `ps -C python`, `top` and `killall` use
        Path("/proc/self/comm").write_text(Path(sys.executable).name[:15])


def words_of(cmdline: bytes) -> list[str]:
    """The words of a /proc/PID/cmdline: a command line, or a title of ours."""
    text = cmdline.rstrip(b"\0").decode(errors="replace")
    if not text.startswith(PREFIX):
        return text.split("\0")
    try:
        return shlex.split(text)
    except ValueError:  # cut within quotes
        return text.split()


def read_words(pid: int) -> list[str]:
    """The words of a process. Raises OSError if it has ended or may not be read."""
    return words_of(Path(f"/proc/{pid}/cmdline").read_bytes())
