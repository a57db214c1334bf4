"""How the save clock follows its ranks' positions."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from support.clocks.waits import until
from support.jobs.placements import make_placement

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.counters import Counters
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.world.save_clock import SaveClock
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

SPEC = CheckpointSpec(every_steps=0, every_s=0.1)
PLACEMENT = make_placement({"a": (0,)}, generation=3)
TICKS = 4


def test_a_step_that_was_passed_by_is_reported_once(tmp_path: Path) -> None:
    generation = HostGeneration(Configure(Fence(1, 3), "a", PLACEMENT, SPEC), "a")
    memory = MemoryTier(str(tmp_path / "flyball-test"), "job", "a")
    reported: list[tuple[int, int]] = []
    positions: list[int] = []

    class Coordination:
        def tick(self, position: int) -> None:
            positions.append(position)

    coordination: Any = Coordination()

    with memory.using(0, create=True) as entry:
        assert entry is not None
        control = entry.segments.control
        control.begin_world(3, -1)
        control.attach_trainer(3)
        clock = SaveClock(
            generation,
            memory=memory,
            coordination=coordination,
            counters=Counters(),
            on_passed_by=lambda rank, step: reported.append((rank, step)),
        )
        control.name_save(5)
        control.write_position(5)
        clock.tick()
        assert reported == []  # it is about to save it
        control.write_position(6)
        for _ in range(TICKS):
            clock.tick()
        assert reported == [(0, 5)]
        control.name_save(9)
        control.write_position(10)
        for _ in range(TICKS):
            clock.tick()
        assert reported == [(0, 5), (0, 9)]
        assert positions == [5, *[6] * TICKS, *[10] * TICKS]
        clock.start()  # its thread ticks on
        until(lambda: len(positions) > 2 * TICKS + 2)
        generation.ended.set()
        until(lambda: all(thread.name != "job-clock" for thread in threading.enumerate()))
        assert reported == [(0, 5), (0, 9)]
    memory.release()
