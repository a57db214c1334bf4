"""Measures the cost of saves: the call, lost training time, steps beside a save, and memory."""

from __future__ import annotations

import gc
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from checkpoint_bench.engine_host import Saver, cluster
from checkpoint_bench.floors import SharedBuffer
from checkpoint_bench.measure import (
    STEP_TO_COPY,
    Options,
    PeakSampler,
    interleaved,
    percentile,
    private_bytes,
    progress,
    ratios,
    resident_bytes,
    seconds,
    spread,
    with_error,
)
from checkpoint_bench.state import MatmulTraining, Training
from ckpt_engine.rules.slot_rules import slot_count
from flyball.contracts.checkpoints import CheckpointSpec

_MIN_ROWS, _MAX_ROWS = 64, 8192
# A difference of two steps is noisier than a copy, so take as many pairs as these times allow.
_ONE_THREAD_BUDGET_S, _BESIDE_BUDGET_S, _INTERFERENCE_BUDGET_S = 90.0, 15.0, 25.0
_TOKENS = 8
_MIB = 1 << 20
_MATMUL_ROWS = 256  # with 64 rows, reading the weights from memory outweighs the products
_MAX_PAIRS = 300


def measure_blocking(options: Options) -> dict[str, Any]:
    """Measure how long `save` blocks the training thread, beside both copies of the same state."""
    training = Training(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    with cluster(1, CheckpointSpec()) as engines:
        saver = Saver(engines.begin()[0], training.state)
        saver.warm_up(3)

        def save() -> float:
            began_s = time.perf_counter()
            handle = saver.save()
            stalled_s = time.perf_counter() - began_s
            saver.settle(handle)
            return stalled_s

        found = interleaved(
            {"memcpy": buffer.memcpy_s, "copy2": buffer.copy2_s, "save": save}, options.repeats, what="blocking"
        )
        saver.job.close()
    return {
        "blocking_ratio": spread(ratios(found["save"], found["copy2"])),
        "blocking_s": spread(found["save"]),
        "memcpy_s": spread(found["memcpy"]),
        "copy2_s": spread(found["copy2"]),
    }


def measure_lost(options: Options) -> dict[str, Any]:
    """Measure the training time lost per save, with what the engine does after it: save and step against a step.

    The figure is for matrix products on one thread, which leave the second core free. Two more are reported: products
    of so few rows that memory limits them, which any memory copy slows down; and GPT on both cores. The machine's own
    share is measured in turns with them: a step beside a thread that only does a memcpy of the state.
    """
    matmuls = MatmulTraining(options.state_bytes)
    one_thread = _lost(options, matmuls, threads=1, budget_s=_ONE_THREAD_BUDGET_S, at_least_rows=_MATMUL_ROWS)
    memory_bound = _lost(options, matmuls, threads=1, budget_s=_BESIDE_BUDGET_S)
    del matmuls
    both_cores = _lost(options, Training(options.state_bytes), threads=2, budget_s=_BESIDE_BUDGET_S)
    return {
        "lost_ratio": one_thread.pop("lost_ratio"),
        "one_thread": one_thread,
        "memory_bound": memory_bound,
        "both_cores": both_cores,
    }


def _lost(
    options: Options, training: Training, *, threads: int, budget_s: float, at_least_rows: int = 0
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    buffer = SharedBuffer(training.tensors())
    memcpy_s = statistics.median(buffer.memcpy_s() for _ in range(5))
    with ThreadPoolExecutor(1) as beside, cluster(1, CheckpointSpec()) as engines:
        saver = Saver(engines.begin()[0], training.state)
        saver.warm_up(3)
        rows = max(at_least_rows, rows_for(training, STEP_TO_COPY * memcpy_s))
        calls_s: list[float] = []

        def alone() -> float:
            return _step_s(training, rows)

        def with_save() -> float:
            began_s = time.perf_counter()
            handle = saver.save()
            calls_s.append(time.perf_counter() - began_s)
            training.step(rows)
            took_s = time.perf_counter() - began_s
            saver.settle(handle)
            return took_s

        def with_memcpy() -> float:
            began_s = time.perf_counter()
            copy = beside.submit(buffer.memcpy)
            training.step(rows)
            took_s = time.perf_counter() - began_s
            copy.result()
            return took_s

        pairs = max(options.repeats, min(_MAX_PAIRS, int(budget_s / (4 * _step_s(training, rows)))))
        found = interleaved(
            {"memcpy": buffer.memcpy_s, "step": alone, "step and save": with_save, "step and memcpy": with_memcpy},
            pairs,
            what=f"lost, {threads} thread(s)",
            between=gc.collect,
        )
        saver.job.close()
    floor_s = statistics.median(found["memcpy"])

    def lost(to: str) -> list[float]:
        return [(with_ - without) / floor_s for with_, without in zip(found[to], found["step"], strict=True)]

    return {
        "lost_ratio": with_error(lost("step and save")),
        "lost_to_memcpy_ratio": with_error(lost("step and memcpy")),
        "save_call_s": spread(calls_s),
        "step_s": spread(found["step"]),
        "step_over_copy": round(statistics.median(found["step"]) / floor_s, 2),
        "rows": rows,
        "memcpy_s": spread(found["memcpy"]),
    }


def measure_interference(options: Options) -> dict[str, Any]:
    """Measure steps between a save and its last byte on the disk, against as many steps without a save.

    As for lost time, the figure is for matrix products; products of few rows, limited by memory, are reported too.
    """
    torch.set_num_threads(1)
    training = MatmulTraining(options.state_bytes)
    buffer = SharedBuffer(training.tensors())
    memcpy_s = statistics.median(buffer.memcpy_s() for _ in range(5))
    del buffer
    disk = options.folder / "interference"
    spec = CheckpointSpec(disk_dir=str(disk), disk_every_steps=1)
    with cluster(1, spec) as engines:
        saver = Saver(engines.begin()[0], training.state)
        saver.warm_up(4, durable=True)
        few_rows = rows_for(training, STEP_TO_COPY * memcpy_s)
        found = _interference(options, training, saver, max(_MATMUL_ROWS, few_rows))
        found["memory_bound"] = _interference(options, training, saver, few_rows)
        saver.job.close()
    return found


def _interference(options: Options, training: Training, saver: Saver, rows: int) -> dict[str, Any]:
    beside: list[float] = []
    quiet: list[float] = []
    blocks = max(options.repeats, min(_MAX_PAIRS, int(_INTERFERENCE_BUDGET_S / (5 * _step_s(training, rows)))))
    for block in range(blocks):
        for saving in (True, False) if block % 2 else (False, True):
            if not saving:
                quiet += [_step_s(training, rows) for _ in range(2)]
                continue
            handle = saver.save()
            while True:
                beside.append(_step_s(training, rows))
                if handle.durable:
                    break
            saver.settle(handle, durable=True)
        progress(f"interference {block + 1}/{blocks}: {beside[-1]:.4g} s beside a save, {quiet[-1]:.4g} s without")
    return {
        "interference_p50": statistics.median(beside) / statistics.median(quiet),
        "interference_p99": percentile(beside, 99) / percentile(quiet, 99),
        "p99_over_quiet_median": round(percentile(beside, 99) / statistics.median(quiet), 4),
        "step_beside_save_s": spread(beside),
        "step_quiet_s": spread(quiet),
        "rows": rows,
    }


def _step_s(training: Training, rows: int) -> float:
    return seconds(lambda: training.step(rows))


def rows_for(training: Training, wanted_s: float) -> int:
    """Return how many rows (tokens or vectors) make a step last at least `wanted_s` seconds."""
    rows = _MIN_ROWS
    while rows < _MAX_ROWS:
        training.step(rows)
        if min(_step_s(training, rows) for _ in range(2)) >= wanted_s:
            return rows
        rows *= 2
    return rows


def measure_extra(options: Options) -> dict[str, Any]:
    """Measure peak memory of both processes with every local tier on: saves to slot, peer and disk beside
    training, then a restore.

    The trainer's figure is the excess of its private memory: over its peak without saves, and, in the restore, over
    what it had before. The engine's is all its memory
    except the slots, interpreter included, for its one rank here. Page cache of the disk tier does not count.
    """
    torch.set_num_threads(1)
    training = Training(options.state_bytes)
    tier = options.folder / "disk-tier"
    spec = CheckpointSpec(disk_dir=str(tier), disk_every_steps=1)
    with cluster(2, spec) as engines:
        host = engines.hosts[0]
        slots = [f"{each.prefix}." for each in engines.hosts] + [str(tier)]
        steps = max(4, options.repeats)
        training.step(_TOKENS)
        with PeakSampler(private_bytes) as before:
            for _ in range(steps):
                training.step(_TOKENS)
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
            with PeakSampler(private_bytes) as saving:
                for _ in range(steps):
                    save_beside_a_step()
            restored = saver.next_step - 1
            for job in jobs:
                job.close()
            at_rest = private_bytes()
            with PeakSampler(private_bytes) as restoring:
                jobs = engines.begin(restored, written_by=engines.generation)
                jobs[0].restore(training.state)
            jobs[1].restore(other.state)
        for job in jobs:
            job.close()
        receiver_peak = resident_bytes(engines.hosts[1].pid, slots)
    trainer_mib = max(0, saving.peak - before.peak, restoring.peak - at_rest) / _MIB
    engine_mib = engine.peak / _MIB
    return {
        "extra_mib": trainer_mib + engine_mib,
        "trainer_mib": round(trainer_mib, 1),
        "trainer_saving_mib": round((saving.peak - before.peak) / _MIB, 1),
        "trainer_restoring_mib": round((restoring.peak - at_rest) / _MIB, 1),
        "engine_mib": round(engine_mib, 1),
        "receiving_engine_after_mib": round(receiver_peak / _MIB, 1),
    }
