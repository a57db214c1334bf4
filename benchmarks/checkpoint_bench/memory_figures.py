"""What saving and restoring take in memory beyond the state and the slots, in the trainer and in its engine."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint_bench.engine_host import cluster
from checkpoint_bench.memory import PeakSampler, forget_peak, peak_bytes, resident_bytes
from checkpoint_bench.options import Options
from checkpoint_bench.state import Training
from checkpoint_bench.trainer import Saver
from ckpt_engine.slots.slot_rules import slot_count
from flyball.contracts.checkpoints import CaptureMode, CheckpointSpec

_TOKENS = 8
_MIB = 1 << 20


def measure_extra(options: Options) -> dict[str, Any]:
    """Peaks of both processes with every local tier on: lazy saves to slot, peer and disk beside training, then a
    restore. Of the trainer, what comes on top of its peak without saves, once its slots are resident; of the engine,
    all that it has but the slots (its interpreter included), which is one rank's here. Files of the disk tier in the
    page cache are not counted."""
    torch.set_num_threads(1)
    training = Training(options.state_bytes)
    tier = options.folder / "disk-tier"
    spec = CheckpointSpec(capture=CaptureMode.LAZY, disk_dir=str(tier), disk_every_steps=1)
    with cluster(2, spec) as engines:
        host = engines.hosts[0]
        slots = [f"{each.prefix}." for each in engines.hosts] + [str(tier)]
        steps = max(4, options.repeats)
        training.step(_TOKENS)
        forget_peak()
        for _ in range(steps):
            training.step(_TOKENS)
        before = peak_bytes(slots)
        jobs = engines.begin()
        saver, other = Saver(jobs[0], training.state), Saver(jobs[1], {"step": 0})

        def save_beside_a_step() -> None:
            handles = saver.save(), other.save()
            training.step(_TOKENS)
            saver.settle(handles[0], durable=True)
            other.settle(handles[1], durable=True)

        with PeakSampler(lambda: resident_bytes(host.pid, slots)) as engine:
            for _ in range(slot_count(spec)):
                save_beside_a_step()
            forget_peak()
            for _ in range(steps):
                save_beside_a_step()
            saving = peak_bytes(slots)
            restored = saver.next_step - 1
            for job in jobs:
                job.close()
            forget_peak()
            jobs = engines.begin(restored, written_by=engines.generation)
            jobs[0].restore(training.state)
            restoring = peak_bytes(slots)
            jobs[1].restore(other.state)
        for job in jobs:
            job.close()
        receiver_peak = resident_bytes(engines.hosts[1].pid, slots)
    trainer_mib = max(0, saving - before, restoring - before) / _MIB
    engine_mib = engine.peak / _MIB
    return {
        "extra_mib": trainer_mib + engine_mib,
        "trainer_mib": round(trainer_mib, 1),
        "trainer_saving_mib": round((saving - before) / _MIB, 1),
        "trainer_restoring_mib": round((restoring - before) / _MIB, 1),
        "engine_mib": round(engine_mib, 1),
        "receiving_engine_after_mib": round(receiver_peak / _MIB, 1),
    }
