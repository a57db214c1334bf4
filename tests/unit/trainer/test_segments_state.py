from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_with_the_library
from support.stores.shards import make_manifest
from torch import nn

from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.trainer.capture.capturer import Capture, Capturer
from ckpt_engine.trainer.restore.load_shard import read_state, restore_into
from flyball.contracts.errors import CorruptShard, StateMismatch, UnsupportedState


def captured(state: dict[str, Any], capturer: Capturer | None = None) -> memoryview:
    prepared: Capture = (capturer or Capturer()).take(state)
    payload = memoryview(bytearray(prepared.payload_bytes))
    prepared.copy_into(0, payload)
    return payload


def manifest_of(payload: memoryview) -> Manifest:
    return make_manifest(payload, generation=0)


def round_trip(state: dict[str, Any], capturer: Capturer | None = None) -> dict[str, Any]:
    payload = captured(state, capturer)
    saved = read_state(MemorySource(payload), manifest_of(payload))
    payload[:] = b"\xff" * len(payload)  # destroys everything that aliases the slot
    return saved


def restore(state: dict[str, Any], payload: memoryview) -> None:
    """Restore into `state` from a copy of the slot, then destroy the copy."""
    slot = memoryview(bytearray(payload))
    restore_into(state, MemorySource(slot), manifest_of(payload))
    slot[:] = b"\xff" * len(slot)


def same(a: object, b: object) -> bool:
    """Equal values and types, recursively; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.nan_to_num(7), b.nan_to_num(7)))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return (
            list(a) == list(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or a.hex() == b.hex()
    if isinstance(a, complex) and isinstance(b, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


LEAVES: list[Any] = [
    *(None, True, False, 0, -1, 2**80, "", "é\ud800", b"", b"\0\xff", 1j, complex(math.inf, -0.0)),
    *(0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324),
    *((), (1, (2,)), [], [None, [True]], {}, {1: "a", "1": "b"}, {(1, 2): 3}, {"$tensor": 1}, {None: 1, True: 2}),
    *(
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({30: 1, 80: 2}),
        {1, 2},
        torch.Size([1, 2]),
        torch.bfloat16,
        torch.device("cpu"),
    ),
    *(np.float32(0.1), np.int64(3), np.bool_(True), np.arange(3, dtype=np.uint32), np.random.default_rng(1).random(3)),
]


def test_the_entries_of_a_state_have_names() -> None:
    """Else 0 and "0" would become one entry."""
    with pytest.raises(UnsupportedState, match="key 0, which is not a string"):
        captured({0: 1, "0": 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("leaf", LEAVES, ids=repr)
def test_leaves_keep_value_and_type(leaf: object) -> None:
    assert same(round_trip({"x": leaf})["x"], leaf)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@settings(deadline=None)
@given(json_like)
def test_any_tree_comes_back_as_it_was(tree: object) -> None:
    assert same(round_trip({"x": tree})["x"], tree)


def test_random_number_generators_come_back() -> None:
    generator = random.Random(3)
    saved = round_trip(
        {"python": generator.getstate(), "numpy": np.random.RandomState(3).get_state(), "torch": torch.get_rng_state()}
    )
    expected = [generator.random() for _ in range(3)]
    generator.setstate(saved["python"])
    assert [generator.random() for _ in range(3)] == expected
    np.random.RandomState(0).set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.randn(3, 4).to(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)),
        *(torch.arange(5).to(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)),
        torch.tensor([True, False]),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(4, 6).t(),
        torch.randn(8, 8)[::2, 1::3],
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex128).conj(),
        torch.randn(2, requires_grad=True) * 2,
        nn.Parameter(torch.randn(2)),
        torch.randn(1).expand(5),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_tensors_keep_every_bit(tensor: torch.Tensor) -> None:
    found = round_trip({"x": {"y": [tensor]}, "other": torch.ones(1, dtype=torch.uint8)})["x"]["y"][0]
    assert found.dtype == tensor.dtype and torch.equal(found, tensor.detach()) and not found.requires_grad


@pytest.mark.parametrize("is_writable", [True, False])
@pytest.mark.parametrize("view", [slice(None), slice(None, None, -2), (slice(1, 3), 0)], ids=str)
def test_numpy_arrays_of_any_kind_keep_every_bit(view: slice | tuple[slice, int], is_writable: bool) -> None:
    array = np.random.default_rng(1).random((6, 4))[view]
    array.flags.writeable = is_writable
    assert same(round_trip({"x": array})["x"], array)


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    weight = torch.randn(100)
    payload = captured({"a": weight, "b": {"c": weight}, "view": weight[:50]})
    stored = load_with_the_library(bytes(payload))  # the library alone can read it
    assert set(stored) == {"a", "view"} and torch.equal(stored["a"], weight)
    saved = read_state(MemorySource(payload), manifest_of(payload))
    assert saved["a"] is saved["b"]["c"]


def test_names_that_would_collide_do_not() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.full((1,), 2.0)}
    assert same(round_trip(state), state)


@pytest.mark.parametrize(
    ("leaf", "path"),
    [
        ({"deep": [0, object()]}, "'x.deep.1' is a builtins.object"),
        ({"f": lambda: 0}, "'x.f' is a builtins.function"),
        ({(torch.ones(1), 0): 1}, r"'x \(a key\)' is, or has in it, a tensor"),
        (torch.randn(2, 2).to_sparse(), "'x' is a sparse"),
        (torch.empty(2, device="meta"), "'x' is a sparse, quantized, nested or meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "'x' is a sparse, quantized, nested"),
        (np.array(["a"]), "'x' is a numpy array of <U1"),
        (np.arange(3, dtype=">i4"), "'x' is a numpy array of >i4"),
        (np.datetime64("2026-01-01"), "'x' is a numpy datetime64"),
        ({object(): 1}, r"'x \(a key\)' is a"),
    ],
)
def test_what_could_only_be_pickled_is_refused_by_its_path(leaf: object, path: str) -> None:
    with pytest.raises(UnsupportedState, match=path):
        Capturer().take({"x": leaf})


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="nested"):
        Capturer().take({"x": loop})


def test_offsets_do_not_move_while_values_grow() -> None:
    capturer = Capturer()
    sizes = {
        capturer.take({"t": torch.zeros(9), "step": step, "lr": 1 / (step + 1)}).payload_bytes for step in range(2000)
    }
    assert len(sizes) == 1
    grown = {"t": torch.zeros(9), "step": "x" * 100_000}
    assert same(round_trip(grown, capturer), grown)


def test_a_plan_serves_states_of_its_structure_only() -> None:
    capturer = Capturer()
    for state in ({"a": torch.ones(3)}, {"a": torch.ones(4)}, {"a": torch.ones(4), "b": torch.ones(1).half()}):
        assert same(round_trip(state, capturer), state)


def network(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    losses = []
    for step in range(steps):
        loss = model(torch.randn(16, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def test_a_restored_model_and_optimizer_go_on_to_the_last_bit() -> None:
    model, optimizer = network(0)
    train(model, optimizer, 3)
    saved = captured({"model": model, "optimizer": optimizer, "data": {"epoch": 2}})
    expected = train(model, optimizer, 3)
    other_model, other_optimizer = network(1)
    state = {"model": other_model, "optimizer": other_optimizer, "data": {"epoch": 0}}
    restore(state, saved)
    assert train(other_model, other_optimizer, 3) == expected
    assert state["data"] == {"epoch": 2}


def test_state_dicts_in_place_of_objects_work_too() -> None:
    model, optimizer = network(0)
    train(model, optimizer, 2)
    saved = captured({"model": model.state_dict(), "nested": [{"model": model}]})
    target, _ = network(1)
    restore({"model": target.state_dict()}, saved)
    assert same(target.state_dict()["0.weight"], model.state_dict()["0.weight"])
    restore({"nested": [{"model": target}]}, saved)


def test_containers_are_filled_in_place_and_leaves_replaced() -> None:
    inner, tensor, items = {"kept": 1, "old": 2}, torch.zeros(2), [1, 2, 3]
    state = {"inner": inner, "tensor": tensor, "items": items, "number": 1, "pair": (1, 2)}
    saved = captured(
        {"inner": {"kept": 5, "old": 6, "new": 7}, "tensor": torch.ones(2), "items": [4], "number": 9, "pair": (3,)}
    )
    restore(state, saved)
    assert state["inner"] is inner and inner == {"kept": 5, "old": 6, "new": 7}
    assert state["tensor"] is tensor and tensor.tolist() == [1, 1]
    assert state["items"] is items and items == [4]
    assert (state["number"], state["pair"]) == (9, (3,))


def wider() -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(4, 9))}


def without_bias() -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(4, 8, bias=False))}


def with_more_layers() -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))}


def half_precision() -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(4, 8)).half()}


def optimizer_of_more() -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW([nn.Parameter(torch.zeros(1))])}


def optimizers_dict() -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(nn.Linear(4, 8).parameters()).state_dict()}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (wider, r"'model.0.weight' is \(9, 4\).*saved as \(8, 4\)"),
        (without_bias, "'model.0.bias' was saved, and the module does not have it"),
        (with_more_layers, "'model.1.(weight|bias)' was not saved"),
        (half_precision, "torch.float16, and was saved as"),
        (optimizer_of_more, "'optimizer' does not take the saved state"),
        (optimizers_dict, "pass the optimizer itself"),
        (lambda: {"scheduler": {}}, "'scheduler' was not saved; the checkpoint has 'model', 'optimizer', 'data'"),
        (lambda: {"data": {"gone": 1}}, "'data.gone' was not saved"),
        (lambda: {"data": torch.zeros(1)}, "'data' is a tensor, and was saved as dict"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_path(target: Callable[[], dict[str, Any]], message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    saved = captured({"model": model, "optimizer": optimizer, "data": {"epoch": 2}})
    with pytest.raises(StateMismatch, match=message):
        restore(target(), saved)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.1),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize(("saved", "target"), [(one, other) for one in KINDS for other in KINDS if one != other])
def test_an_optimizer_takes_the_state_of_no_other_kind(saved: str, target: str) -> None:
    model = nn.Linear(4, 8)
    optimizer = KINDS[saved](model.parameters())
    train(model, optimizer, 1)
    shard = captured({"model": model, "optimizer": optimizer})
    other = nn.Linear(4, 8)
    before = other.weight.clone()
    with pytest.raises(StateMismatch, match=r"'optimizer' has .*, and was saved with "):
        restore({"model": other, "optimizer": KINDS[target](other.parameters())}, shard)
    assert torch.equal(other.weight, before), "nothing was written"


def test_an_optimizer_takes_what_schedulers_users_and_earlier_releases_of_torch_have_saved() -> None:
    model = nn.Linear(4, 8)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "layer": 3}], lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    train(model, optimizer, 1)
    for name in ("fused", "decoupled_weight_decay", "differentiable"):
        del optimizer.param_groups[0][name]
    shard = captured({"optimizer": optimizer})
    fresh = torch.optim.AdamW(nn.Linear(4, 8).parameters(), lr=0.5)
    restore({"optimizer": fresh}, shard)
    assert fresh.param_groups[0]["layer"] == 3 and fresh.param_groups[0]["decoupled_weight_decay"]


def test_all_that_does_not_fit_is_named_at_once_and_not_without_end() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    saved = captured({"model": model, "data": {"epoch": 2}})
    with pytest.raises(StateMismatch) as refused:
        restore({"model": nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8)), "data": {"gone": 1}, "more": 1}, saved)
    paths = ("model.0.weight", "model.1.weight", "model.1.bias", "data.gone", "more")
    assert all(f"'{path}'" in str(refused.value) for path in paths), refused.value
    with pytest.raises(StateMismatch, match="It differs in 32 more places") as refused:
        restore({"model": nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))}, captured({"model": nn.Sequential()}))
    assert len(str(refused.value)) < 1000


def test_a_flipped_byte_is_found_before_anything_is_loaded() -> None:
    payload = captured({"t": torch.ones(1000)})
    manifest = manifest_of(payload)
    payload[-1] ^= 1
    with pytest.raises(CorruptShard, match="Chunk 0"):
        read_state(MemorySource(payload), manifest)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"flyball.format":"2"', b'"flyball.format":"3"'),
        (b"$tensor", b"$sensor"),
        (b'"dtype":"F32"', b'"dtype":"F64"'),
        (b'"dtype":"F32"', b'"dtype":"F99"'),
        (b'\\"t\\":{', b'\\"t\\":}'),
    ],
)
def test_a_description_that_makes_no_sense_is_corrupt_and_never_evaluated(old: bytes, new: bytes) -> None:
    data = bytes(captured({"t": torch.ones(4)}))
    assert old in data
    payload = memoryview(bytearray(data.replace(old, new)))
    with pytest.raises(CorruptShard):
        read_state(MemorySource(payload), manifest_of(payload))


@pytest.mark.parametrize("left_bytes", [0, 64])
def test_a_tensor_whose_memory_was_freed_is_refused_by_name(left_bytes: int) -> None:
    """As code does that shards or offloads parameters. To read it would end the process, or save foreign bytes."""
    capturer, state = Capturer(), {"model": {"w": torch.ones(100, 100)}}
    capturer.take(state)
    state["model"]["w"].untyped_storage().resize_(left_bytes)
    with pytest.raises(UnsupportedState, match=r"'model\.w' has no memory of its size"):
        (capturer if left_bytes == 0 else Capturer()).take(state)
