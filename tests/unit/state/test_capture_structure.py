"""A structure kept from one save to the next serves only states of that structure, whatever changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.shards import make_manifest
from torch import nn

from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.capture.kept_structure import KeptStructure, take_apart
from ckpt_engine.trainer.restore.load_shard import read_state
from ckpt_engine.trainer.state.state_tree import FlatState, flatten
from flyball.contracts.errors import UnsupportedState

State = dict[str, Any]


def training_state() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    shared = torch.arange(12.0)
    return {
        "model": model,
        "optimizer": optimizer,
        "ema": {"w": torch.ones(4, 4), "b": torch.zeros(4)},
        "more": [torch.ones(3), (torch.zeros(2), 5), {1: torch.ones(1), "x": None}],
        "spectrum": torch.ones(3, dtype=torch.complex64),
        "random": np.random.RandomState(3).get_state(),
        "big": np.random.default_rng(1).bit_generator.state,
        "views": [shared[:6].view(2, 3), shared[:6].view(2, 3), shared],
        "empty": torch.empty(0, 3),
        "step": 7,
    }


def described(flat: FlatState) -> dict[str, tuple[Any, ...]]:
    return {
        name: (t.shape, t.dtype, t.stride(), t.device, t.data_ptr(), t.tolist()) for name, t in flat.tensors.items()
    }


class StateReader:
    """Takes states apart, one after the other."""

    structure: KeptStructure | None = None

    def flatten(self, state: State) -> FlatState:
        kept, self.structure = self.structure, None
        flat, self.structure = take_apart(state, kept)
        return flat


def check(reader: StateReader, state: State) -> FlatState:
    """The reader's result equals `flatten`'s."""
    found, expected = reader.flatten(state), flatten(state)
    assert found.tree == expected.tree
    assert list(found.tensors) == list(expected.tensors)
    assert described(found) == described(expected)
    assert found.blocks == expected.blocks
    return found


def saved(capturer: Capturer, state: State) -> State:
    prepared = capturer.take(state)
    payload = memoryview(bytearray(prepared.payload_bytes))
    prepared.copy_into(0, payload)
    manifest = make_manifest(payload, generation=0)
    return read_state(MemorySource(payload), manifest)


def test_the_structure_of_a_training_run_stays_the_same_while_all_values_change() -> None:
    reader, state = StateReader(), training_state()
    first, structure = check(reader, state), reader.structure
    state["model"](torch.randn(4, 8)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].param_groups[0]["lr"] = 0.05
    state |= {"step": "eight", "big": np.random.default_rng(2).bit_generator.state}
    state["ema"] = {"w": torch.ones(4, 4) * 2, "b": torch.ones(4)}
    state["random"] = np.random.RandomState(4).get_state()
    second = check(reader, state)
    assert reader.structure is structure is not None
    assert second.tree != first.tree


def replace_a_view(state: State) -> None:
    state["views"][1] = state["views"][1].clone()


def share_memory(state: State) -> None:
    state["more"][0].set_(state["views"][2][:3])


def resize(state: State) -> None:
    state["ema"]["b"].resize_(2)


def swap_data(state: State) -> None:
    state["ema"]["b"].data = torch.ones(4, dtype=torch.float64)


def transpose(state: State) -> None:
    state["ema"]["w"].t_()


def change_a_key_type(state: State) -> None:
    tensor = state["more"][2].pop(1)
    state["more"][2] = {True: tensor, **state["more"][2]}


def grow_the_model(state: State) -> None:
    state["model"].append(nn.Linear(2, 2))


def start_a_momentum(state: State) -> None:
    group = state["optimizer"].param_groups[0]
    state["optimizer"].state[group["params"][0]]["max_exp_avg_sq"] = torch.zeros_like(group["params"][0])


CHANGES: dict[str, Callable[[State], object]] = {
    "a tensor in place of a number": lambda state: state.update(step=torch.tensor(7)),
    "a number in place of a tensor": lambda state: state["ema"].update(b=1.0),
    "an array in place of a tensor": lambda state: state["ema"].update(b=np.zeros(4, dtype=np.float32)),
    "another dtype": lambda state: state["ema"].update(b=torch.zeros(4, dtype=torch.float64)),
    "another dtype in place": swap_data,
    "another dtype of the model": lambda state: state["model"].double(),
    "another shape": lambda state: state["ema"].update(b=torch.zeros(2, 2)),
    "resized in place": resize,
    "other strides": lambda state: state["ema"].update(w=torch.ones(4, 4).t()),
    "transposed in place": transpose,
    "no longer complex": lambda state: state.update(spectrum=torch.ones(3, 2)),
    "another dtype of an array": lambda state: state.update(random=np.ones(3)),
    "negative lazily": lambda state: state["ema"].update(b=torch.ones(4, dtype=torch.complex64).conj().imag),
    "a new entry": lambda state: state.update(new=torch.ones(1)),
    "a removed entry": lambda state: state.pop("empty"),
    "a new key": lambda state: state["ema"].update(c=torch.ones(1)),
    "a removed key": lambda state: state["ema"].pop("b"),
    "a renamed key": lambda state: state["ema"].update(c=state["ema"].pop("b")),
    "another order": lambda state: state["ema"].update(w=state["ema"].pop("w")),
    "another type of key": change_a_key_type,
    "another type of container": lambda state: state.update(ema=OrderedDict(state["ema"])),
    "a list in place of a tuple": lambda state: state["more"].__setitem__(1, list(state["more"][1])),
    "a longer list": lambda state: state["more"].append(torch.ones(1)),
    "a dict in place of the model": lambda state: state.update(model=state["model"].state_dict()),
    "a larger model": grow_the_model,
    "new optimizer state": start_a_momentum,
    "no longer shared": replace_a_view,
    "shared from now on": share_memory,
    "no longer empty": lambda state: state.update(empty=torch.ones(1, 3)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_of_structure_is_seen(change: Callable[[State], object]) -> None:
    reader, state = StateReader(), training_state()
    check(reader, state)
    before = reader.structure
    change(state)
    check(reader, state)
    after = reader.structure
    assert after is not before
    check(reader, state)
    assert reader.structure is after


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_saved_after_a_change_is_what_a_new_capture_saves(change: Callable[[State], object]) -> None:
    capturer, state = Capturer(), training_state()
    saved(capturer, state)
    change(state)
    again, anew = flatten(saved(capturer, state)), flatten(saved(Capturer(), state))
    assert again.tree == anew.tree
    assert {n: t.tolist() for n, t in again.tensors.items()} == {n: t.tolist() for n, t in anew.tensors.items()}


def test_other_tensors_of_the_same_look_are_read_where_they_are() -> None:
    capturer, state = Capturer(), {"a": torch.zeros(9000), "b": torch.zeros(3)}
    saved(capturer, state)
    state["a"] = torch.ones(9000)
    state["b"].set_(torch.ones(3))
    again = saved(capturer, state)
    assert torch.equal(again["a"], torch.ones(9000))
    assert torch.equal(again["b"], torch.ones(3))


def test_half_a_surrogate_pair_is_saved_beside_what_is_kept_or_is_a_large_number() -> None:
    name = "run-\udcff"  # a file name that is not UTF-8, in Python
    state = {"files": {name: torch.ones(2), "newest": name, "seed": 1 << 70}, "model": {"w": torch.zeros(9000)}}
    reader, capturer = StateReader(), Capturer()
    for _ in range(3):
        check(reader, state)
        assert reader.structure is not None
        again = saved(capturer, state)
        assert (again["files"]["newest"], again["files"]["seed"]) == (name, 1 << 70)
        assert torch.equal(again["files"][name], torch.ones(2))


def test_what_cannot_be_saved_is_refused_after_what_could() -> None:
    reader = StateReader()
    for bad in (torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta"), object(), np.array(["a"])):
        check(reader, {"x": {"y": torch.ones(2, 2)}})
        with pytest.raises(UnsupportedState, match=r"'x\.y'"):
            reader.flatten({"x": {"y": bad}})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UnsupportedState, match="nested"):
        reader.flatten({"x": {"y": nested}})


def test_an_object_is_asked_for_its_state_once_also_when_the_structure_has_changed() -> None:
    class Loader:
        asked = 0
        state: object = torch.zeros(1)

        def state_dict(self) -> State:
            self.asked += 1
            return {"state": self.state}

        def load_state_dict(self, state: State) -> None: ...

    reader, loader = StateReader(), Loader()
    reader.flatten({"data": loader})
    loader.state = 5
    reader.flatten({"data": loader})
    assert loader.asked == 2


def test_a_tensor_in_a_set_is_no_structure_that_could_be_kept() -> None:
    reader, tensor = StateReader(), torch.ones(2)
    for _ in range(2):
        check(reader, {"x": {tensor}, "y": 1})
        assert reader.structure is None


tensors = st.sampled_from([torch.zeros(2), torch.zeros(2).double(), torch.zeros(3), torch.zeros(2, 1), np.zeros(2)])
keys = st.sampled_from(["a", "b", 0, 1, True, None])
states = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.recursive(
        tensors | st.none() | st.integers() | st.text(max_size=2),
        lambda inner: st.lists(inner, max_size=2) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=2),
        max_leaves=5,
    ),
)


@settings(deadline=None)
@given(st.lists(states, min_size=2, max_size=4))
def test_any_state_after_any_other_is_found_as_it_is(following: list[State]) -> None:
    reader = StateReader()
    for state in following:
        check(reader, state)
        check(reader, state)
