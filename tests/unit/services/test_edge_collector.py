"""Objects that survive a long full collection are frozen, until the next scan of everything."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.clocks.manual import ManualClock

from services.runtime.process import LONG_S, SCAN_ALL_EVERY_S, FreezeOld


def test_what_survives_a_long_collection_is_frozen_for_an_hour() -> None:
    clock = ManualClock(0.0)
    done: list[str] = []
    leave_out = FreezeOld(clock, freeze=lambda: done.append("freeze"), unfreeze=lambda: done.append("unfreeze"))

    def collect(took_s: float, generation: int = 2) -> list[str]:
        done.clear()
        leave_out("start", {"generation": generation})
        clock.now_s += took_s
        leave_out("stop", {"generation": generation})
        return list(done)

    assert collect(LONG_S / 2) == []
    assert collect(2 * LONG_S, generation=1) == []
    assert collect(2 * LONG_S) == ["freeze"]
    assert collect(LONG_S / 2) == []
    assert collect(2 * LONG_S) == ["freeze"]
    clock.now_s += SCAN_ALL_EVERY_S
    assert collect(LONG_S / 2) == ["unfreeze"]
    assert collect(LONG_S / 2) == []
    assert collect(2 * LONG_S) == ["freeze"]


SCRIPT = """
import gc, weakref
from services.runtime import process as collector
from flyball.contracts.clock import SystemClock
class Thing: pass
collector.LONG_S = 0.0
gc.callbacks.append(collector.FreezeOld(SystemClock()))
things = [Thing() for _ in range(1000)]
gone = weakref.ref(things[0])
gc.collect()
assert gc.get_freeze_count() > 1000, gc.get_freeze_count()
del things
assert gone() is None
"""


@pytest.mark.processes
def test_what_is_frozen_is_freed_when_it_is_dropped() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
