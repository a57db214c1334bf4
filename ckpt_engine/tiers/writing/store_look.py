"""Looks at a slow tier's storage that somebody waits for with a deadline: a shared folder that hangs keeps one thread,
however often it is asked for."""

from __future__ import annotations

import threading
import time

import structlog

from ckpt_engine.counters import Counters
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.errors import FlyballError

log = structlog.get_logger()


class StoreLook:
    """Has one store looked at again, by one thread at a time."""

    def __init__(self, disk: ShardStore, counters: Counters) -> None:
        self._disk = disk
        self._counters = counters
        self._asked = 0
        self._done = 0  # the newest that was asked for before a look began that has ended
        self._looking = False
        self._changed = threading.Condition()

    def ask(self) -> int:
        """Have it looked at, from now on; what is returned is for `wait`."""
        with self._changed:
            self._asked += 1
            if not self._looking:
                WorkerThread(f"look-{self._disk.tier}", self._look, counters=self._counters).start()
                self._looking = True
            return self._asked

    def wait(self, asked: int, deadline_s: float) -> bool:
        """Until a look that began after `ask` has ended, well or not; False if that takes too long, on the monotonic
        clock."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= asked, max(deadline_s - time.monotonic(), 0.0))

    def _look(self) -> float | None:
        with self._changed:
            if self._done == self._asked:
                self._looking = False
                return None
            asked = self._asked
        try:
            self._disk.scan()
        except (FlyballError, OSError) as error:  # what was known of it stays
            log.warning("disk_not_scanned", tier=str(self._disk.tier), reason=str(error))
        finally:
            with self._changed:
                self._done = asked
                self._changed.notify_all()
        return 0.0
