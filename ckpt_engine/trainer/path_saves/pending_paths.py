"""Paths whose newest save is not yet on the disk, and Python code that would notice.

Code that has just saved may copy the file, rename or remove it, or open it with another library. In this process it
waits then: Python announces every such call to audit hooks before it makes it.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass

# Not `os.stat`, `os.listdir`: Python does not announce what they look at, and there is a file to be seen.
# The number says how many of the first arguments are paths.
_EVENTS = {
    **{"open": 1, "os.remove": 1, "os.truncate": 1, "os.rmdir": 1, "shutil.rmtree": 1},
    **{"os.rename": 2, "os.link": 2},
}


@dataclass(slots=True)
class _Pending:
    newest: int = -1
    settled: int = -1


class PendingPaths:
    """The paths, and who waits for them. For any number of threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paths: dict[str, _Pending] = {}
        self._exempt: set[int] = set()  # threads that write them

    def add(self, path: str, step: int) -> None:
        """This save is to be written."""
        with self._changed:
            self._paths.setdefault(path, _Pending()).newest = step

    def settle(self, path: str, step: int) -> None:
        """This save, and older ones, are on the disk, or will not be for now."""
        with self._changed:
            pending = self._paths.get(path)
            if pending is not None:
                pending.settled = max(step, pending.settled)
                if pending.settled >= pending.newest:
                    del self._paths[path]
            self._changed.notify_all()

    def wait(self, path: str, step: int, timeout_s: float) -> bool:
        """Wait until this save, or a newer one, is settled. False if time runs out."""

        def is_settled() -> bool:
            pending = self._paths.get(path)
            return pending is None or pending.settled >= step

        with self._changed:
            return self._changed.wait_for(is_settled, timeout_s)

    def wait_all(self, timeout_s: float) -> bool:
        """Wait until everything is settled. False if time runs out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._paths, timeout_s)

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def __len__(self) -> int:
        return len(self._paths)

    def exempt_this_thread(self) -> None:
        """It writes the files, so it must not wait for them."""
        self._exempt.add(threading.get_ident())

    def watch(self, timeout_s: float) -> None:
        """From now on, have Python's own file functions wait for pending paths, each at most `timeout_s`."""
        pid, events = os.getpid(), _EVENTS  # a forked child has nobody who writes; at the end globals may be gone

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if not self._paths or event not in events or pid != os.getpid():
                return
            if threading.get_ident() in self._exempt:
                return
            for argument in arguments[: events[event]]:
                for path, step in self._meant_by(argument):
                    self.wait(path, step, timeout_s)

        sys.addaudithook(hook)

    def _meant_by(self, argument: object) -> list[tuple[str, int]]:
        """The pending paths that a call with this argument touches: the file itself, or all in a folder."""
        if not isinstance(argument, str | bytes | os.PathLike):
            return []
        try:
            name = os.path.realpath(os.fsdecode(argument))
        except (ValueError, OSError):  # the call itself will say so
            return []
        with self._changed:
            touched = [path for path in self._paths if path == name or path.startswith(name + "/")]
            return [(path, self._paths[path].newest) for path in touched]
