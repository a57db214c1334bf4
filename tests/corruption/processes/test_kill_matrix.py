"""Kill -9 of the trainer, the engine, both, and all processes of all hosts, at every stage of the pipeline. A new
generation restores the newest committed step bit for bit, and training goes on.

A process that reaches the fault point is stopped there. Then the kills are done, and stopped processes continue.
"""

from __future__ import annotations

import os
import signal

import pytest
from support.clocks.waits import until
from support.hosts.forked import state_in_kernel
from support.hosts.forked_site import ForkedSite

from ckpt_engine.format import integrity
from ckpt_engine.trainer.restore.load_shard import read_manifest
from flyball.contracts import fault_points
from flyball.contracts.checkpoints import Tier
from flyball.contracts.on_host.engine_wire import Flush

TRAINERS = ("slot.begun", "capture.half", "slot.before_captured")
ENGINE_OF_RANK_0 = ("persistent.world", "persistent.sealed")  # only on the coordinator's host
RESHARDING = ("engine.chunks_announced", "engine.chunks_half")  # tests/integration/engine/test_reshard_faults.py
STORED_ONCE = ("disk.part", "persistent.part")  # tests/integration/engine/test_engine_across_hosts.py
ENGINES = tuple(
    name
    for name in fault_points.KNOWN
    if name.startswith(("slot.", "engine.", "file.", "disk.", "persistent."))
    and name not in ("disk.world", "disk.sealed", "engine.refill", *RESHARDING, *STORED_ONCE)
)
CONTROL_PLANE = ("sensor.", "controller.", "actuator.")  # tests/integration/recovery/parts, test_edge_processes.py
ELSEWHERE = {
    *("disk.world", "disk.sealed"),  # never reached: a host's own disk has no world manifest
    "engine.refill",  # for hosts that lost their memory: tests/integration/engine/test_engine_refill.py
    *RESHARDING,
    *STORED_ONCE,
    *(name for name in fault_points.KNOWN if name.startswith(CONTROL_PLANE)),
}
POINTS = [*(("trainer", name) for name in TRAINERS), *(("engine", name) for name in ENGINES)]
VICTIMS = ("trainer", "engine", "both", "all")


def matrix() -> list[object]:
    """Every point with two of the victims, in turn; with the other two by make proofs."""
    cells = []
    for number, (who, point) in enumerate(POINTS):
        usual = VICTIMS[number % 2 :: 2]
        for victims in VICTIMS:
            marks = () if victims in usual else (pytest.mark.proof,)
            cells.append(pytest.param(who, point, victims, marks=marks, id=f"{who}-{point}-{victims}"))
    return cells


def test_every_fault_point_is_in_the_matrix_or_elsewhere() -> None:
    assert {*TRAINERS, *ENGINES, *ELSEWHERE} == set(fault_points.KNOWN)
    assert not ELSEWHERE & {*TRAINERS, *ENGINES}


@pytest.mark.parametrize(("who", "point", "victims"), matrix())
def test_after_a_kill_the_newest_committed_step_is_restored(
    site: ForkedSite, who: str, point: str, victims: str
) -> None:
    host = site.hosts["a" if point in ENGINE_OF_RANK_0 else "b"]
    stop = f"{point}:1:SIGSTOP"
    site.begin({host.name: f"{point}:4:SIGSTOP"} if who == "trainer" else None)
    site.train_until(2)
    before = site.committed()
    if who == "engine":
        host.control_engine(f"stop {stop}")
    if point == "engine.armed":
        site.arm_ranks(host)
    elif point == "engine.flush":
        host.ask_and_forget(Flush("job", 60.0, durable=True))
    stopped = host.trainer if who == "trainer" else host.engine
    until(lambda: state_in_kernel(stopped) == "T", f"{who} reaches {point}")

    before = max(before, site.committed())
    everybody = [pid for each in site.hosts.values() for pid in (each.trainer, each.engine)]
    pids = {
        "trainer": [host.trainer],
        "engine": [host.engine],
        "both": [host.trainer, host.engine],
        "all": everybody,
    }[victims]
    site.kill(*pids)
    if stopped not in pids:
        os.kill(stopped, signal.SIGCONT)
    assert site.recover() >= before


def test_after_all_of_it_training_goes_on_and_every_file_matches_its_manifest(site: ForkedSite) -> None:
    site.begin()
    site.train_until(5)
    slow = {Tier.DISK, Tier.PERSISTENT}
    until(lambda: all(slow <= {c.tier for c in status.copies} for status in site.status()), "steps are on the disks")
    before = site.committed()
    assert site.recover() >= before
    with site.engines_stopped():  # they keep pruning
        manifests = [*(site.root / "disk").rglob("*.manifest"), *(site.root / "store").rglob("rank*.manifest")]
        for path in manifests:
            manifest = read_manifest(path.with_suffix(".safetensors"))
            payload = memoryview(path.with_suffix(".safetensors").read_bytes())
            integrity.verify(payload, manifest.chunk_digests, manifest.chunk_bytes)
    assert len(manifests) >= 4
