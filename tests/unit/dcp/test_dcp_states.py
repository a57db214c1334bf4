"""What DCP saves and loads with its own FileSystemWriter and FileSystemReader, it does with ours: in one process, the
same state into the same targets, through both."""

from __future__ import annotations

import copy
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.testing._internal.two_tensor
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from ckpt_engine.dcp import FlyballReader, FlyballSavePlanner, FlyballWriter
from ckpt_engine.trainer.restore.load_step import load_step
from flyball.contracts.errors import Conflict, StateMismatch, UnsupportedState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {value for name, value in vars(torch).items() if re.fullmatch("u?int[1-7]|bits.*|bit|q.*", name)},
    key=str,
)


def of_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits that the dtype has."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (size_bytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def zeroed(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return [zeroed(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(one: object, other: object, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape) and raw(one) == raw(other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}.{index}")
    else:
        assert one == other or (one != one and other != other), path


class Outcome:
    """What a pair of writer and reader makes of a state: what is loaded, or the error."""

    def __init__(self, state: dict[str, Any], target: dict[str, Any], folder: Path, *, ours: bool) -> None:
        self.error: BaseException | None = None
        self.loaded = target
        writer = FlyballWriter(folder) if ours else dcp.FileSystemWriter(folder)
        reader = FlyballReader(folder) if ours else dcp.FileSystemReader(folder)
        try:
            self.metadata = dcp.save(state, storage_writer=writer)
            dcp.load(target, storage_reader=reader)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - compared with that of the other
            self.error = error


def sharing(w: torch.Tensor) -> dict[str, Any]:
    return {"one": w, "two": w, "part": w[1:], "again": {"w": w}}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "nested": lambda: {
        "model": {"a": {"w": of_bytes((3, 4), torch.float32, 1)}, "b": [of_bytes((2,), torch.bfloat16, 2), 5]},
        "lists": [[1, 2, [of_bytes((2, 2), torch.int64, 3)]], "x"],
        "tuple": (1, 2.5, "three", None),
    },
    "values": lambda: {
        "none": None, "int": 3, "big": 1 << 80, "float": math.pi, "nan": math.nan, "inf": -math.inf, "true": True,
        "text": "héllo", "bytes": b"\x00\xff" * 9, "list": [1, 2], "empty_list": [], "size": torch.Size((2, 3)),
        "dtype": torch.float16, "set": {1, 2}, "complex": 1 + 2j,
    },
    "odd_names": lambda: {
        "__metadata__": of_bytes((2,), torch.float32, 1), "$x": {"$tensor": of_bytes((2,), torch.float32, 2)},
        "a.b": of_bytes((1,), torch.int8, 3), "": of_bytes((1,), torch.int8, 4), "ключ": of_bytes((3,), torch.int8, 5),
        "ints": {0: of_bytes((1,), torch.int8, 6), 1: "one"},
    },
    "empty_and_zero_dim": lambda: {
        "scalar": torch.tensor(2.5), "flag": torch.tensor(True), "empty": torch.empty(0, 3), "none": torch.empty(0),
    },
    "nothing": dict,
    "views": lambda: {
        "transposed": of_bytes((4, 6), torch.float32, 1).t(), "strided": of_bytes((20,), torch.int32, 2)[3::2],
        "expanded": torch.arange(3).expand(4, 3), "slice": of_bytes((100,), torch.float64, 3)[7:11],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.randn(3, dtype=torch.complex64).conj(), "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
    },
    "shared": lambda: sharing(of_bytes((5, 2), torch.float32, 1)),
    "parameters": lambda: {
        "p": torch.nn.Parameter(torch.randn(3)), "b": torch.nn.Buffer(torch.randn(3)),
        "grad": torch.randn(2, requires_grad=True),
    },
    "large": lambda: {"w": of_bytes((700, 1000), torch.float32, 1), "v": of_bytes((3,), torch.uint8, 2), "n": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_from_torchs_own(tmp_path: Path, name: str) -> None:
    state = STATES[name]()
    theirs = Outcome(state, zeroed(state), tmp_path / "theirs", ours=False)
    ours = Outcome(state, zeroed(state), tmp_path / "ours", ours=True)
    assert (theirs.error, ours.error) == (None, None)
    assert_same(ours.loaded, theirs.loaded)
    assert list(ours.metadata.state_dict_metadata.items()) == list(theirs.metadata.state_dict_metadata.items())
    assert ours.metadata.planner_data == theirs.metadata.planner_data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"w": of_bytes((3, 5), dtype, 1), "x": of_bytes((), dtype, 2), "y": of_bytes((0, 2), dtype, 3)}
    target = {
        name: torch.zeros(tensor.nbytes, dtype=torch.uint8).view(dtype).reshape(tensor.shape)
        for name, tensor in state.items()
    }
    dcp.save(state, storage_writer=FlyballWriter(tmp_path / "c"))
    dcp.load(target, storage_reader=FlyballReader(tmp_path / "c"))
    assert_same(target, state)


def test_modules_optimizers_and_own_objects_come_back(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "at": torch.tensor([self.count])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"] + int(state["at"]) * 100

    def made(seed: int, steps: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters())
        counter = Counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            counter.count += 1
        return {"model": model, "optimizer": optimizer, "counter": counter}

    def described(state: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": dict(state["model"].state_dict()),
            "optimizer": state["optimizer"].state_dict(),
            "n": state["counter"].count,
        }

    state = made(1, 3)
    results = []
    for ours in (False, True):
        target = made(2, 1)
        outcome = Outcome(state, target, tmp_path / str(ours), ours=ours)
        assert outcome.error is None, outcome.error
        results.append(described(target))
    assert_same(results[1], results[0])
    assert results[1]["n"] == 303


def test_a_load_casts_and_reads_parts_as_torchs_own_does(tmp_path: Path) -> None:
    state = {"w": torch.randn(6, 4), "v": torch.arange(5), "n": 7, "left": torch.randn(3)}
    target = {
        "w": torch.zeros(6, 4, dtype=torch.float16).t().contiguous().t(),
        "v": torch.zeros(5, dtype=torch.float64),
        "n": 0,
    }
    results = []
    for ours in (False, True):
        outcome = Outcome(state, copy.deepcopy(target), tmp_path / str(ours), ours=ours)
        assert outcome.error is None, outcome.error
        results.append(outcome.loaded)
    assert_same(results[1], results[0])


@pytest.mark.parametrize("case", ["missing", "shape", "tensor_for_value"])
def test_what_torchs_planners_refuse_is_refused(tmp_path: Path, case: str) -> None:
    state = {"w": torch.randn(2, 3), "n": 1}
    target = {"missing": {"w": torch.zeros(2, 3), "other": torch.zeros(1)}, "shape": {"w": torch.zeros(3, 2)},
              "tensor_for_value": {"w": 3}}[case]  # fmt: skip
    theirs = Outcome(state, copy.deepcopy(target), tmp_path / "theirs", ours=False)
    ours = Outcome(state, copy.deepcopy(target), tmp_path / "ours", ours=True)
    assert isinstance(theirs.error, CheckpointException) and isinstance(ours.error, CheckpointException)
    assert str(ours.error.failures[0][0]) == str(theirs.error.failures[0][0])


def test_a_partial_load_leaves_what_was_not_saved(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=FlyballWriter(tmp_path / "c"))
    target = {"w": torch.zeros(3), "new": torch.full((2,), 5.0)}
    dcp.load(target, storage_reader=FlyballReader(tmp_path / "c"), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_same(target, {"w": torch.ones(3), "new": torch.full((2,), 5.0)})


@pytest.mark.parametrize("ours", [False, True])
def test_a_state_without_a_target_is_rebuilt_from_the_metadata(tmp_path: Path, ours: bool) -> None:
    state = {"model": {"w": torch.randn(2, 3), "list": [torch.ones(1), 4]}, "lr": 0.5}
    reader = FlyballReader(tmp_path / "c") if ours else dcp.FileSystemReader(tmp_path / "c")
    dcp.save(state, storage_writer=FlyballWriter(tmp_path / "c") if ours else dcp.FileSystemWriter(tmp_path / "c"))
    assert_same(_load_state_dict_from_keys(storage_reader=reader), state)
    assert_same(_load_state_dict_from_keys("model", storage_reader=reader), {"model": state["model"]})


def test_planners_of_others_work(tmp_path: Path) -> None:
    class HalfPlanner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def transform_object(self, item: WriteItem, value: object) -> object:
            value = super().transform_object(item, value)
            return value.half() if isinstance(value, torch.Tensor) else value

    state = {"w": torch.randn(4, 4), "n": 3}
    target = {"w": torch.zeros(4, 4), "n": 0}
    for planner in (HalfPlanner(), HalfPlanner(flatten_state_dict=False), FlyballSavePlanner()):
        dcp.save(state, storage_writer=FlyballWriter(tmp_path / "c"), planner=planner)
        flat = planner.flatten_state_dict
        dcp.load(
            target, storage_reader=FlyballReader(tmp_path / "c"), planner=DefaultLoadPlanner(flatten_state_dict=flat)
        )
        expected = state["w"] if isinstance(planner, FlyballSavePlanner) else state["w"].half().float()
        assert torch.equal(target["w"], expected)


def unsavable() -> dict[str, object]:
    wrapped = torch.testing._internal.two_tensor.TwoTensor(torch.ones(2), torch.ones(2))
    return {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(2, device="meta"),
        "subclass": wrapped,
    }


@pytest.mark.parametrize("kind", ["sparse", "quantized", "meta", "subclass"])
def test_a_tensor_without_plain_memory_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CheckpointException) as refused:
        dcp.save({"model": {"odd": unsavable()[kind]}}, storage_writer=FlyballWriter(tmp_path / "c"))
    error = refused.value.failures[0][0]
    assert isinstance(error, UnsupportedState) and "'model.odd'" in str(error)
    assert not (tmp_path / "c" / "dcp.metadata").exists()


def test_torchs_writer_takes_our_plans(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 4), "n": 5}
    for number in range(2):
        planner = FlyballSavePlanner()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / str(number)), planner=planner)
        assert planner.used_cache == (number == 1)
        target = {"w": torch.zeros(3, 4), "n": 0}
        dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / str(number)))
        assert_same(target, state)


def test_a_plan_that_torch_kept_too_long_is_refused(tmp_path: Path) -> None:
    """Its cache does not look at dtypes."""
    for dtype in (torch.float32, torch.float32):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": torch.ones(3, dtype=dtype)}, storage_writer=FlyballWriter(tmp_path / "c"), planner=planner)
    with pytest.raises(CheckpointException) as refused:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": torch.ones(3).half()}, storage_writer=FlyballWriter(tmp_path / "c"), planner=planner)
    assert isinstance(refused.value.failures[0][0], StateMismatch) and "'w'" in str(refused.value)


def test_every_reader_of_steps_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "step-40"
    state = {"model": {"w": torch.randn(3, 2), "c": torch.randn(2, dtype=torch.complex64)}, "lr": 0.1, "at": [1, "x"]}
    dcp.save(state, storage_writer=FlyballWriter(folder))
    with safe_open(folder / "rank0.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("model.w"), state["model"]["w"])
    target = {"model": {"w": torch.zeros(3, 2), "c": torch.zeros(2, dtype=torch.complex64)}, "lr": 0.0, "at": []}
    manifest = load_step(folder, target, rank=0)
    assert_same(target, state)
    assert (manifest.step, manifest.world_size, manifest.job) == (40, 1, "dcp")


def test_a_checkpoint_is_replaced_only_by_a_complete_one(tmp_path: Path) -> None:
    class Broken(DefaultSavePlanner):
        def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
            if item.index.fqn == "w":
                raise RuntimeError("lost")
            return super().resolve_data(item)

    folder = tmp_path / "latest"
    dcp.save({"w": torch.ones(300, 1000)}, storage_writer=FlyballWriter(folder))
    with pytest.raises(CheckpointException, match="lost"):
        dcp.save({"w": torch.zeros(300, 1000)}, storage_writer=FlyballWriter(folder), planner=Broken())
    target = {"w": torch.zeros(300, 1000)}
    dcp.load(target, storage_reader=FlyballReader(folder))
    assert torch.equal(target["w"], torch.ones(300, 1000))
    with pytest.warns(UserWarning, match="is replaced"):
        dcp.save({"w": torch.full((2,), 3.0)}, storage_writer=FlyballWriter(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["dcp.metadata", "rank0.manifest", "rank0.safetensors"]
    with pytest.raises(CheckpointException) as refused:
        dcp.save({"w": torch.zeros(1)}, storage_writer=FlyballWriter(folder, overwrite=False))
    assert isinstance(refused.value.failures[0][0], Conflict)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="flyball-test-", dir="/dev/shm"))
    yield folder / "latest"
    shutil.rmtree(folder)


def test_in_memory_a_save_writes_into_the_memory_of_the_last_but_one(in_memory: Path) -> None:
    def save(value: float, rows: int) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": torch.full((rows, 1000), value), "n": value}, storage_writer=FlyballWriter(in_memory))
        return (in_memory / "rank0.safetensors").stat().st_ino

    files = [save(float(number), rows) for number, rows in enumerate((600, 600, 600, 600, 300, 900))]
    assert files[0] == files[2] == files[4] and files[1] == files[3] == files[5] != files[0]
    target = {"w": torch.zeros(900, 1000), "n": 0.0}
    dcp.load(target, storage_reader=FlyballReader(in_memory))
    assert torch.equal(target["w"], torch.full((900, 1000), 5.0)) and target["n"] == 5.0
