"""`flyball.save` and `load` in the place of torch's: what else a file keeps of its tensors, their arguments, its names,
and what those see who do not see the memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flyball
from ckpt_engine.path_saves.pending_mark import SaveElsewhere, mark_file
from ckpt_engine.trainer.capture.kept_structure import take_apart
from ckpt_engine.trainer.path_saves import load_path as loading
from ckpt_engine.trainer.path_saves.path_saver import PathSaver
from ckpt_engine.trainer.state.state_tree import TreeWalk, encode
from flyball.contracts.errors import UsageError


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PathSaver]:
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path / "shm"))
    made = PathSaver()
    monkeypatch.setattr("ckpt_engine.trainer.path_saves.path_saver._saver", made)
    yield made
    made.finish_at_exit()


def views() -> dict[str, Any]:
    whole = torch.arange(24.0)
    image = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    complex_ = torch.complex(torch.arange(4.0), torch.arange(4.0))
    parameter = nn.Parameter(torch.ones(3))
    hidden = torch.arange(10)
    return {
        "whole": whole,
        "part": whole[3:9].view(2, 3),
        "transposed": whole.view(4, 6).t(),
        "bits": whole.view(torch.int32),
        "image": image,
        "pixel": image[0, :, 1],
        "complex": complex_,
        "real": torch.view_as_real(complex_),
        "parameter": parameter,
        "tied": [parameter],
        "data": parameter.data,
        "left": hidden[:6],
        "right": hidden[4:],
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "apart": whole.clone(),
        "columns": torch.arange(24.0).view(6, 4).t(),
        "empty": torch.empty(0, 3),
    }


def facts(state: dict[str, Any]) -> dict[str, Any]:
    """Everything about the tensors but their addresses; and which of them share memory, seen by writing to each."""
    found: dict[str, Any] = {
        name: (type(t), t.requires_grad, t.dtype, t.stride(), t.tolist()) for name, t in state.items() if name != "tied"
    }
    found["tied"] = state["tied"][0] is state["parameter"]
    for name, tensor in state.items():
        if name in ("tied", "empty"):
            continue
        before = {other: t.detach().clone() for other, t in state.items() if other != "tied"}
        with torch.no_grad():
            tensor.view(-1)[-1:].add_(1) if tensor.is_contiguous() else tensor.add_(1)
        found[f"writes to {name}"] = [o for o, was in before.items() if not torch.equal(was, state[o].detach())]
        with torch.no_grad():
            tensor.view(-1)[-1:].sub_(1) if tensor.is_contiguous() else tensor.sub_(1)
    return found


def test_a_file_keeps_what_torchs_file_keeps(saver: PathSaver, tmp_path: Path) -> None:
    saved = views()
    by_torch = {name: saved[name] for name in saved.keys() - {"bits", "real"}}  # it refuses views of other dtypes
    torch.save(by_torch, tmp_path / "torch.pt")
    assert facts(torch.load(tmp_path / "torch.pt")) == facts(by_torch)
    for path in (tmp_path / "a.pt", tmp_path / "a.pt"):  # the second save knows the structure
        flyball.save(saved, path)
    for _ in ("from memory", "from the disk"):
        assert facts(flyball.load(tmp_path / "a.pt")) == facts(saved)
        saver.finish_at_exit()


def test_other_strides_come_back_contiguous_with_the_same_values(saver: PathSaver, tmp_path: Path) -> None:
    saved = {"every other": torch.arange(10.0)[::2], "expanded": torch.ones(1).expand(4)}
    flyball.save(saved, tmp_path / "a.pt")
    found = flyball.load(tmp_path / "a.pt")
    assert all(torch.equal(found[name], saved[name]) and found[name].is_contiguous() for name in saved)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda state: None,
    "requires_grad": lambda state: state["p"].requires_grad_(requires_grad=False),
    "type": lambda state: state.update(p=state["p"].data),
    "strides": lambda state: state.update(w=state["w"].contiguous(memory_format=torch.channels_last)),
    "a view": lambda state: state.update(v=state["w"].view(-1)[:24].view(4, 6)),
    "a move": lambda state: state.update(w=state["w"].clone()),
    "a move onto another": lambda state: state.update(v=state["w"].view(-1)[12:36].view(4, 6)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_known_structure_is_not_used_where_anything_of_it_has_changed(change: str) -> None:
    state = {"p": nn.Parameter(torch.ones(3)), "w": torch.randn(2, 3, 4, 5), "v": torch.zeros(4, 6)}
    _, structure = take_apart(state, None, exact=True)
    assert structure is not None
    CHANGES[change](state)
    for _ in range(2):
        flat, structure = take_apart(state, structure, exact=True)
        walk = TreeWalk(exact=True)
        assert flat.tree == encode(walk.entries(state))
        assert {name: t.data_ptr() for name, t in flat.tensors.items()} == {
            name: t.data_ptr() for name, t in walk.tensors.items()
        }


def test_the_arguments_of_torchs_functions_are_taken(saver: PathSaver, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    flyball.save({"a": 1}, f=path, pickle_module=torch, pickle_protocol=2)
    assert flyball.load(f=path, map_location="cpu", pickle_module=torch, mmap=True, weights_only=True) == {"a": 1}
    flyball.save({"a": 2}, path=path)
    assert flyball.load(path=path) == {"a": 2}
    for call in (lambda: flyball.load(path, path=path), lambda: flyball.save({"a": 1})):
        with pytest.raises(UsageError, match="Give one path"):
            call()


@pytest.mark.parametrize("name", ["a" * 252 + ".pt", "é" * 127, "b" * 207, "b" * 208])
def test_a_name_may_be_as_long_as_the_file_system_allows(saver: PathSaver, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for value in (1, 2):
        assert flyball.save({"x": value}, folder / name).wait()
    saver.finish_at_exit()
    assert flyball.load(folder / name) == {"x": 2} and [file.name for file in folder.iterdir()] == [name]


# --- those who see the file and not the memory ---


@pytest.mark.parametrize("is_first", [True, False])
def test_who_does_not_see_the_memory_never_gets_the_older_file(
    saver: PathSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    path, shm = tmp_path / "run.pt", tmp_path / "shm"
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(loading, "ELSEWHERE_WAIT_S", 0.0)
    if not is_first:
        assert flyball.save({"x": 1}, path).wait() and not mark_file(str(path)).exists()
    monkeypatch.setattr(PathSaver, "_write", lambda self, *_: None)  # the disk is slow
    flyball.save({"x": 2}, path)
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path / "other"))
    with pytest.raises(SaveElsewhere, match=f"in the memory of process {os.getpid()} on .*remove .*run.pt.flyball"):
        flyball.load(path)
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(shm))
    assert flyball.load(path) == {"x": 2}
    monkeypatch.undo()
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(shm))
    saver.pending.add(str(path), 0)
    saver._thread.wake()  # type: ignore[union-attr]
    saver.finish_at_exit()
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path / "other"))
    assert flyball.load(path) == {"x": 2} and not mark_file(str(path)).exists()


def test_whoever_replaces_the_file_has_the_last_word_for_others_too(
    saver: PathSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the mark stays, since its process was killed."""
    path, older = tmp_path / "run.pt", tmp_path / "older.pt"
    assert flyball.save({"x": 0}, older).wait() and flyball.save({"x": 1}, path).wait()
    monkeypatch.setattr(PathSaver, "_write", lambda self, *_: None)
    flyball.save({"x": 2}, path)
    assert mark_file(str(path)).exists()
    saver.pending.settle(str(path), 99)
    older.replace(path)
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path))
    assert flyball.load(path) == {"x": 0}


def test_a_complex_view_that_begins_between_its_parts_is_no_view(tmp_path: Path) -> None:
    """The group begins with an odd element, so the complex one would not be aligned in it."""
    whole = torch.randn(16)
    parts = {"a": whole[1:], "c": torch.view_as_complex(whole.view(-1, 2))[1:]}
    flyball.save(parts, tmp_path / "file").wait()
    loaded = flyball.load(tmp_path / "file")
    assert all(torch.equal(loaded[name], parts[name]) for name in parts)
