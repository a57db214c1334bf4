"""A flipped bit of a parameter, in real shards of four ranks: the digests name rank and tensor, and the job goes back
to a clean step."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save
from support.hosts.engine_reports import signals_of
from support.policy.views import HOSTS, JOB, NOW, SETTINGS, decided, say, view
from support.stores.shards import make_manifest

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format
from ckpt_engine.host.save_reports import DifferingLog
from ckpt_engine.rules.storage_plan import HeldShard, StoragePlan, plan
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.on_host.engine_wire import EngineReply
from flyball.contracts.reports.signals import ReplicasDiffer
from services.controller.policy import decide

RANKS = (0, 1, 2, 3)
CHUNK_BYTES = 1 << 12
SHAPES = {"model.w": (40, 70), "model.b": (70,), "norm": (3,), "optim.m": (40, 70), "optim.step": ()}


def state(step: int, rank: int) -> dict[str, np.ndarray]:
    values = np.random.default_rng(step)
    same = {name: values.random(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    own = np.random.default_rng([step, rank])  # a random generator's state, and what a rank measures for itself
    return same | {"rng": own.integers(0, 256, 5000, dtype=np.uint8), "own": own.random(9, dtype=np.float32)}


def compare(step: int, states: dict[int, dict[str, np.ndarray]]) -> StoragePlan:
    payloads = {rank: memoryview(bytearray(save(tensors))) for rank, tensors in states.items()}
    shards = {}
    for rank, payload in payloads.items():
        described = make_manifest(payload, step, rank, generation=2, world_size=len(RANKS), chunk_bytes=CHUNK_BYTES)
        digest = manifests.digest(manifests.encode(described))
        shards[rank] = HeldShard(shard_format.read_header(payload), described, digest)
    return plan(shards, lambda rank, begin, end: xxhash.xxh3_128_digest(payloads[rank][begin:end]))


def flips(count: int) -> Iterator[tuple[int, str, int]]:
    chance = random.Random(17)
    for _ in range(count):
        name = chance.choice(sorted(SHAPES))
        bits = 32 * int(np.prod(SHAPES[name]))
        yield chance.choice(RANKS), name, chance.randrange(bits)


def flip(tensor: np.ndarray, bit: int) -> np.ndarray:
    changed = bytearray(tensor.tobytes())
    changed[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(changed), tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize(("rank", "name", "bit"), list(flips(50)))
def test_every_flip_names_rank_and_tensor_and_the_job_goes_back_to_a_clean_step(rank: int, name: str, bit: int) -> None:
    log = DifferingLog("job")
    for step in (44, 46):
        assert log.note(2, 40, step, compare(step, {r: state(step, r) for r in RANKS}), 1000.0 + step) == []
    spoilt = {r: state(48, r) for r in RANKS}
    spoilt[rank][name] = flip(spoilt[rank][name], bit)
    reports = log.note(2, 40, 48, compare(48, spoilt), 1048.0)
    (body,) = signals_of(EngineReply(ok=True, differing=tuple(reports)))
    assert isinstance(body, ReplicasDiffer)
    assert (body.tensors, body.differ, body.equal_step) == ((name,), (rank,), 46)
    saved = [
        ShardCopy("job", 2, step, r, Tier.DISK, h, 1, "d") for step in (44, 46, 48) for r, h in ((0, "a"), (1, "b"))
    ]
    decision = decided(decide(view(job=JOB, hosts=HOSTS, copies=saved), [say(body, source="a")], SETTINGS, NOW))
    assert decision.rule == "restart_before_the_harm"
    assert f"Rank {rank} on a differs" in decision.reason and name in decision.reason
    assert decision.action is not None and decision.action.next is not None
    assert decision.action.next.known_step == 46


def test_two_replicas_that_part_are_reported_without_blame() -> None:
    log = DifferingLog("job")
    for step in (44, 46):
        assert log.note(2, -1, step, compare(step, {r: state(step, r) for r in (0, 1)}), 1.0) == []
    spoilt = {r: state(48, r) for r in (0, 1)}
    spoilt[1]["model.w"] = flip(spoilt[1]["model.w"], 77)
    (report,) = log.note(2, -1, 48, compare(48, spoilt), 2.0)
    assert (report.tensors, report.agree, report.differ, report.equal_step) == (("model.w",), (), (0, 1), 46)


@pytest.mark.parametrize("ranks", [(0, 1), RANKS])
def test_states_that_start_alike_and_part_later_are_no_harm(ranks: tuple[int, ...]) -> None:
    """Zeros at first, and neighbours in the same chunks that are replicas and change."""
    log = DifferingLog("job")
    for step in range(40, 48):
        states = {r: state(step, r) for r in ranks}
        for r in ranks:
            own = np.random.default_rng([step, r]).random((40, 70), dtype=np.float32)
            states[r] |= {"moments": own if step >= 44 else np.zeros_like(own), "meter": own[0, :2] * (step >= 44)}
        assert log.note(2, -1, step, compare(step, states), 1.0) == []
