"""A damaged, mixed or incomplete checkpoint is refused, with what is wrong; what is not read does not count."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands.here import run_here
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_engine.dcp import FlyballReader, FlyballWriter
from ckpt_engine.dcp.metadata_file import DCP_FORMAT_VERSION
from ckpt_engine.format import manifest as manifests
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.* is replaced once")
ROWS = 3000  # a dozen chunks


def saved(folder: Path, value: float = 1.0) -> None:
    state = {"first": torch.full((ROWS, 1000), value), "last": torch.full((10,), value), "n": 3}
    dcp.save(state, storage_writer=FlyballWriter(folder))


def loaded(folder: Path, *names: str) -> dict[str, object]:
    state = {"first": torch.zeros(ROWS, 1000), "last": torch.zeros(10), "n": 0}
    target: dict[str, object] = {name: state[name] for name in names or state}
    dcp.load(target, storage_reader=FlyballReader(folder))
    return target


def refused(folder: Path) -> FlyballError:
    with pytest.raises(CheckpointException) as found:
        loaded(folder)
    error = found.value.failures[0][0]
    assert isinstance(error, FlyballError | AssertionError)  # torch's own, if it cannot have the metadata
    return error  # type: ignore[return-value]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def edited(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads(path.read_bytes().splitlines()[0])
    change(content)
    path.write_bytes(manifests.as_file(json.dumps(content).encode()))


def test_a_changed_byte_is_found_wherever_it_is_read(tmp_path: Path) -> None:
    saved(tmp_path)
    shard = tmp_path / "rank0.safetensors"
    flip(shard, 5_000_000)
    error = refused(tmp_path)
    assert isinstance(error, CorruptShard) and "Chunk 4" in str(error)
    assert loaded(tmp_path, "last", "n")["n"] == 3, "other chunks are good"
    done = run_here("ckpt", "verify", "--dir", str(tmp_path), environment={})
    assert done.returncode == 21, done.stdout + done.stderr


def test_the_command_line_verifies_a_good_one(tmp_path: Path) -> None:
    saved(tmp_path / "step-7")
    done = run_here("ckpt", "verify", "--dir", str(tmp_path / "step-7"), "-o", "json", environment={})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["good"], found["bad"], found["steps"][0]["step"]) == (1, 0, 7)


def test_files_of_two_saves_do_not_pass_for_one(tmp_path: Path) -> None:
    saved(tmp_path / "one", 1.0)
    saved(tmp_path / "two", 2.0)
    for name in ("rank0.safetensors", "rank0.manifest"):
        (tmp_path / "two" / name).rename(tmp_path / "one" / name)
    error = refused(tmp_path / "one")
    assert isinstance(error, CorruptShard) and "of another save" in str(error)


@pytest.mark.parametrize("name", ["rank0.safetensors", "rank0.manifest"])
def test_a_missing_or_short_file_is_named(tmp_path: Path, name: str) -> None:
    saved(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-40])
    assert isinstance(refused(tmp_path), CorruptShard)
    (tmp_path / name).unlink()
    assert isinstance(refused(tmp_path), RestoreFailed) and "does not exist" in str(refused(tmp_path))


def test_without_its_description_there_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "dcp.metadata").unlink()
    assert "dcp.metadata does not exist" in str(refused(tmp_path))


def test_a_changed_description_and_one_of_a_later_release_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "dcp.metadata"
    good = path.read_bytes()
    flip(path, 50)
    assert "does not match its checksum" in str(refused(tmp_path))
    path.write_bytes(good)
    edited(path, lambda content: content.update(version=DCP_FORMAT_VERSION + 1))
    assert f"has format {DCP_FORMAT_VERSION + 1}; this release" in str(refused(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor["chunks"].clear(),
        lambda tensor: tensor["chunks"][0].__setitem__(1, [ROWS - 1, 1000]),
        lambda tensor: tensor["chunks"][0].__setitem__(0, [1, 0]),
    ],
    ids=["none", "short", "shifted"],
)
def test_an_element_without_a_chunk_is_an_error_that_names_the_tensor(
    tmp_path: Path, change: Callable[[dict[str, list[list[object]]]], object]
) -> None:
    saved(tmp_path)
    edited(tmp_path / "dcp.metadata", lambda content: change(content["entries"]["first"]))  # type: ignore[index]
    error = refused(tmp_path)
    assert isinstance(error, RestoreFailed) and "elements of 'first'" in str(error)


def test_a_checkpoint_of_the_first_release_loads(tmp_path: Path) -> None:
    """Written when the format was made. It has every kind of entry."""
    folder = Path(__file__).parent / "first_dcp_checkpoint"
    state = {
        "model": {"w": torch.zeros(2, 3), "half": torch.zeros(4, dtype=torch.bfloat16)},
        "complex": torch.zeros(2, dtype=torch.complex64),
        "scalar": torch.zeros((), dtype=torch.int64),
        "empty": torch.zeros(0, 2),
        "list": [torch.zeros(1), 0],
        "text": "",
    }
    dcp.load(state, storage_reader=FlyballReader(folder))
    model = state["model"]
    assert torch.equal(model["w"], torch.arange(6.0).view(2, 3))  # type: ignore[index, call-overload]
    assert torch.equal(model["half"], torch.arange(4).bfloat16())  # type: ignore[index, call-overload]
    assert torch.equal(state["complex"], torch.tensor([1 + 2j, -1j]))  # type: ignore[arg-type]
    assert (state["scalar"], state["text"]) == (torch.tensor(7), "hällo")
    assert state["list"] == [torch.tensor([5.0]), 6]


def test_what_killed_saves_left_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in (".rank0.safetensors.new.12-ab-0", ".rank5.manifest.new.12-ab-1", "notes.txt"):
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / "dcp.rank1.metadata").write_bytes(b"of another save")
    saved(tmp_path)
    names = {"dcp.metadata", "notes.txt", "rank0.manifest", "rank0.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
