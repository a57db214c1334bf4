"""A step of any layout, loaded into any other, is what was saved: random meshes, placements and shapes. The ranks run
one after the other in this process."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.jobs.fake_ranks import Placements, as_rank, local, spread
from support.jobs.saved_steps import write_shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.shard_format import read_header
from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.trainer.restore.load_shard import read_manifest
from ckpt_engine.trainer.restore.load_step import StepLoad, load_step
from ckpt_engine.trainer.restore.open_shard import OpenShard
from flyball.contracts.errors import CorruptShard, RestoreFailed, StateMismatch

SHAPES: Mapping[str, tuple[int, ...]] = {"a": (7, 5), "b": (6,), "c": (3, 4, 2), "d": (), "e": (0, 3)}
DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.complex64, "d": torch.int64, "e": torch.float64}


class Layout(NamedTuple):
    """`placements`: of each tensor, or None for a plain one."""

    mesh: tuple[int, ...]
    placements: Mapping[str, Placements | None]

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)


def truth() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: (torch.randn(shape) * 100).to(DTYPES[name]) for name, shape in SHAPES.items()}


def state_of(layout: Layout, mesh: DeviceMesh, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: spread(value, mesh, layout.placements[name]) for name, value in values.items()}


def save(folder: Path, layout: Layout) -> None:
    for rank in range(layout.ranks):
        with as_rank(rank, layout.mesh) as mesh:
            write_shard(folder, rank, layout.ranks, {**state_of(layout, mesh, truth()), "rank": rank})


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def layouts() -> st.SearchStrategy[Layout]:
    def of(mesh: tuple[int, ...]) -> st.SearchStrategy[Layout]:
        def placements(shape: tuple[int, ...]) -> st.SearchStrategy[Placements | None]:
            one = st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])
            return st.none() | st.tuples(*[one] * len(mesh))

        return st.builds(Layout, st.just(mesh), st.fixed_dictionaries({n: placements(s) for n, s in SHAPES.items()}))

    return st.sampled_from([(1,), (2,), (3,), (4,), (2, 2)]).flatmap(of)


@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(saved=layouts(), wanted=layouts())
def test_any_layout_is_loaded_into_any_other(tmp_path: Path, saved: Layout, wanted: Layout) -> None:
    folder = tmp_path / "step"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save(folder, saved)
    whole = truth()
    for rank in range(wanted.ranks):
        with as_rank(rank, wanted.mesh) as mesh:
            empty = {name: torch.zeros_like(value) for name, value in whole.items()}
            state: dict[str, Any] = {**state_of(wanted, mesh, empty), "rank": -1}
            targets = dict(state)
            assert load_step(folder, state, rank=rank).rank == rank % saved.ranks
            expected = state_of(wanted, mesh, whole)
            for name in whole:
                assert state[name] is targets[name], "filled in place"
                assert same(local(state[name]), local(expected[name])), name
            assert state["rank"] == rank % saved.ranks


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(saved=layouts(), wanted=layouts())
def test_a_load_reads_the_chunks_that_it_announced_and_no_others(tmp_path: Path, saved: Layout, wanted: Layout) -> None:
    """All other bytes are wiped out before it begins."""
    folder = tmp_path / "step"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save(folder, saved)
    stored = [(folder / f"rank{rank}.safetensors").read_bytes() for rank in range(saved.ranks)]
    described = [read_manifest(folder / f"rank{rank}.safetensors") for rank in range(saved.ranks)]
    for rank in range(wanted.ranks):
        sources = [memoryview(bytearray(data)) for data in stored]
        with as_rank(rank, wanted.mesh) as mesh:
            state = state_of(wanted, mesh, {name: torch.zeros_like(value) for name, value in truth().items()})
            shards = [
                OpenShard(MemorySource(data), manifest) for data, manifest in zip(sources, described, strict=True)
            ]
            load = StepLoad(state, shards, rank=rank)
            chunks = load.chunks()
            for number, data in enumerate(sources):
                for chunk in range(-(-len(data) // 64)):
                    if chunk not in chunks.get(number, ()):
                        begin = chunk * 64
                        data[begin : begin + 64] = bytes(len(data[begin : begin + 64]))
            load.run()
            for name, expected in state_of(wanted, mesh, truth()).items():
                assert same(local(state[name]), local(expected)), name


def test_what_several_shards_have_is_read_from_the_nearest(tmp_path: Path) -> None:
    save(tmp_path, Layout((3,), dict.fromkeys(SHAPES, (Replicate(),))))
    with as_rank(0, (1,)) as mesh:
        state = state_of(Layout((1,), dict.fromkeys(SHAPES)), mesh, truth())
        paths = [tmp_path / f"rank{rank}.safetensors" for rank in range(3)]
        shards = [OpenShard(MemorySource(memoryview(path.read_bytes())), read_manifest(path)) for path in paths]
        for near in range(3):
            load = StepLoad(state, shards, rank=0, nearness=lambda number, near=near: int(number != near))
            assert load.chunks().keys() == {near}


def optimized(mesh: DeviceMesh, placements: Placements | None) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(spread(torch.randn(5, 4), mesh, placements))
    return parameter, torch.optim.AdamW([parameter])


@pytest.mark.parametrize(("before", "after"), [((Shard(0),), (Shard(1),)), ((Shard(1),), None), (None, (Shard(0),))])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_an_optimizers_state_follows_its_parameters(
    tmp_path: Path, before: Placements | None, after: Placements | None, has_stepped: bool
) -> None:
    moments = torch.arange(20.0).reshape(5, 4)

    def with_moments(mesh: DeviceMesh, placements: Placements | None, values: torch.Tensor) -> torch.optim.Optimizer:
        parameter, optimizer = optimized(mesh, placements)
        optimizer.state[parameter] = {
            "step": torch.tensor(9.0),
            "exp_avg": spread(values, mesh, placements),
            "exp_avg_sq": spread(values * 2, mesh, placements),
        }
        return optimizer

    for rank in range(2):
        with as_rank(rank, (2,)) as mesh:
            write_shard(tmp_path, rank, 2, {"optimizer": with_moments(mesh, before, moments)})
    for rank in range(3):
        with as_rank(rank, (3,)) as mesh:
            optimizer = with_moments(mesh, after, moments * 0) if has_stepped else optimized(mesh, after)[1]
            load_step(tmp_path, {"optimizer": optimizer}, rank=rank)
            ((parameter, found),) = optimizer.state.items()
            assert found["step"] == 9
            assert isinstance(found["exp_avg"], DTensor) is isinstance(parameter, DTensor)
            assert same(local(found["exp_avg"]), local(spread(moments, mesh, after)))
            assert same(local(found["exp_avg_sq"]), local(spread(moments * 2, mesh, after)))


SPLIT = Layout((2,), dict.fromkeys(SHAPES, (Shard(0),)) | {"d": None})


def test_what_no_shard_has_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with as_rank(0, (2,)) as mesh:
        block = spread(torch.ones(6), mesh, (Shard(0),))
        for rank in range(2):  # both ranks saved the same half
            write_shard(tmp_path, rank, 2, {"x": torch.ones(2), "b": block})
    state = {"x": torch.zeros(2), "b": torch.zeros(6)}
    with pytest.raises(RestoreFailed, match=r"3 elements of 'b', the first of them in \[3:6\]"):
        load_step(tmp_path, state, rank=0)
    assert not state["x"].any() and not state["b"].any()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(RestoreFailed, match="holds no shard"):
        load_step(tmp_path, {}, rank=0)
    save(tmp_path, SPLIT)
    (tmp_path / "rank1.manifest").unlink()
    with pytest.raises(RestoreFailed, match="lacks the shards of rank 1; 2 ranks saved the step"):
        load_step(tmp_path, {}, rank=0)


def test_shards_of_two_steps_are_not_mixed(tmp_path: Path) -> None:
    save(tmp_path, SPLIT)
    write_shard(tmp_path, 1, 2, {"a": torch.ones(2)}, step=4)
    with pytest.raises(CorruptShard, match=r"rank 1 in .* is not of the same step"):
        load_step(tmp_path, {}, rank=0)


def test_another_shape_or_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, SPLIT)
    for state, message in (({"a": torch.zeros(7, 4)}, "was saved as"), ({"z": 0}, "was not saved")):
        with pytest.raises(StateMismatch, match=message):
            load_step(tmp_path, state, rank=0)


def test_a_flipped_bit_in_a_needed_chunk_is_found(tmp_path: Path) -> None:
    save(tmp_path, SPLIT)
    path = tmp_path / "rank1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    last = max(manifests.entries_of(read_header(memoryview(data))), key=lambda entry: entry.byte_range).fqn
    with pytest.raises(CorruptShard):
        load_step(tmp_path, {last: torch.zeros(SHAPES[last], dtype=DTYPES[last])}, rank=0)
