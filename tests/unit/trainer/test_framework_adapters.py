"""The adapters, without their frameworks: those are in tests/frameworks."""

from __future__ import annotations

import importlib
import random
import sys
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flyball
from ckpt_engine.frameworks.foreign_objects import ForeignObjects, NamedFields
from ckpt_engine.frameworks.state_parts import named_fields, random_states, set_random_states
from ckpt_engine.trainer.state.state_tree import flatten
from flyball.contracts.errors import ConfigurationError, CorruptShard, UnsupportedState

PACKAGES = {
    "deepspeed": "deepspeed",
    "huggingface": "transformers",
    "lightning": "lightning",
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
}


@pytest.mark.parametrize(("adapter", "package"), PACKAGES.items(), ids=PACKAGES)
def test_an_adapter_without_its_framework_says_what_to_install(
    adapter: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package.removesuffix("-core"), None)
    monkeypatch.delitem(sys.modules, f"ckpt_engine.frameworks.{adapter}", raising=False)
    with pytest.raises(ConfigurationError, match=f"pip install {package}"):
        importlib.import_module(f"ckpt_engine.frameworks.{adapter}")


def draw() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), random.random(), float(np.random.normal()), float(torch.randn(()))  # noqa: TID251


def test_random_generators_go_on_where_they_were_read_and_their_states_need_no_pickle() -> None:
    draw()  # a second normal number is kept for later, by Python and by numpy
    states = random_states()
    expected = [draw() for _ in range(3)]
    flatten(states)
    set_random_states(states)
    assert [draw() for _ in range(3)] == expected


class Progress:
    step, loss, extra = 3, 0.5, "?"


def test_a_field_that_nobody_declared_is_an_error_with_its_path() -> None:
    saved, left_out = frozenset({"step", "loss"}), frozenset({"host"})
    fields = named_fields(Progress(), ["loss", "step"], saved=saved, left_out=left_out, path="trainer.state")
    assert fields == {"step": 3, "loss": 0.5}
    with pytest.raises(UnsupportedState, match=r"trainer\.state\.extra"):
        named_fields(Progress(), ["loss", "step", "extra"], saved=saved, left_out=left_out, path="trainer.state")


class Stage(Enum):
    FIRST = 1


@dataclass
class Slice:
    start: int
    of: torch.Tensor


OBJECTS = ForeignObjects([NamedFields(Stage), NamedFields(Slice, ("start", "of"))])


@pytest.fixture
def paths_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()


@pytest.mark.usefixtures("paths_memory")
def test_declared_objects_are_saved_by_their_fields_and_come_back_as_they_were(tmp_path: Path) -> None:
    state = {"stage": Stage.FIRST, "parts": OrderedDict(a=[Slice(3, torch.arange(4)), None], b=({"x": 1},)), 7: 0.5}
    flyball.save(OBJECTS.encode(state), tmp_path / "state")
    loaded: dict[Any, Any] = OBJECTS.decode(flyball.load(tmp_path / "state"))
    part = loaded["parts"]["a"][0]
    assert (loaded["stage"], type(part), part.start, part.of.tolist()) == (Stage.FIRST, Slice, 3, [0, 1, 2, 3])
    assert type(loaded["parts"]) is OrderedDict
    assert (loaded["parts"]["b"], loaded[7]) == (({"x": 1},), 0.5)


def test_an_attribute_or_a_class_that_nobody_declared_is_an_error_with_its_path(tmp_path: Path) -> None:
    more = Slice(3, torch.arange(4))
    more.owner = "me"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedState, match=r"parts\.0\.owner"):
        OBJECTS.encode({"parts": [more]})
    with pytest.raises(UnsupportedState, match=r"parts\.0"):
        flyball.save(OBJECTS.encode({"parts": [Progress()]}), tmp_path / "state")
    with pytest.raises(CorruptShard, match=r"Stage, which is not declared"):
        ForeignObjects([]).decode(OBJECTS.encode([Stage.FIRST]))
    with pytest.raises(CorruptShard, match="cannot be made"):
        OBJECTS.decode(OBJECTS.encode(Stage.FIRST) | {"flyball.fields": {}})
