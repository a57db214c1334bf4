"""A module's state dict says by which versions of its modules it was saved. Whatever loads it must hear that: else a
module reads its own values as those of an old layout."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from support.jobs.saved_steps import write_shard
from support.stores.shards import make_manifest
from torch import nn

from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.frameworks.foreign_objects import ForeignObjects
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.capture.kept_structure import KeptStructure, take_apart
from ckpt_engine.trainer.path_saves.load_path import load_path
from ckpt_engine.trainer.path_saves.path_saver import process_saver
from ckpt_engine.trainer.restore.load_shard import restore_into
from ckpt_engine.trainer.restore.load_step import load_step
from ckpt_engine.trainer.state.state_tree import flatten


class Versioned(nn.Module):
    """Version 1 kept `scale` in tenths."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.seen: object = "nothing"

    def _load_from_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: object
    ) -> None:
        self.seen = local_metadata.get("version")
        if self.seen is None or self.seen < 2:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Older(Versioned):
    _version = 1


def model(kind: type[Versioned] = Versioned, value: float = 7.0) -> nn.Module:
    whole = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": kind()}))
    nn.init.constant_(whole[1]["inner"].scale, value)  # type: ignore[index]
    return whole


def seen(whole: nn.Module) -> tuple[object, float]:
    inner = whole[1]["inner"]  # type: ignore[index]
    return inner.seen, inner.scale.item()


def restored(saved: dict[str, Any], target: dict[str, Any]) -> None:
    capture = Capturer().take(saved)
    payload = memoryview(bytearray(capture.payload_bytes))
    capture.copy_into(0, payload)
    restore_into(target, MemorySource(payload), make_manifest(payload, generation=0))


def through_a_job(saved: nn.Module, target: nn.Module, _folder: Path) -> None:
    restored({"m": saved}, {"m": target})


def through_a_file(saved: nn.Module, target: nn.Module, folder: Path) -> None:
    """The state dict is the whole file."""
    assert process_saver().save(saved.state_dict(), folder / "a.pt").wait()
    target.load_state_dict(load_path(folder / "a.pt", None))


def inside_a_file_through_an_adapter(saved: nn.Module, target: nn.Module, folder: Path) -> None:
    objects = ForeignObjects(())
    assert process_saver().save(objects.encode({"module": [saved.state_dict()]}), folder / "b.pt").wait()
    target.load_state_dict(objects.decode(load_path(folder / "b.pt", None))["module"][0])


def through_a_step_of_stages(saved: nn.Module, target: nn.Module, folder: Path) -> None:
    """Two ranks have a part of the modules each, and one rank restores both."""
    whole = saved.state_dict()
    for rank, part in enumerate(("0.", "1.")):
        stage = OrderedDict((name, value) for name, value in whole.items() if name.startswith(part))
        stage._metadata = {n: v for n, v in whole._metadata.items() if f"{n}.".startswith(part) or not n}  # type: ignore[attr-defined]
        write_shard(folder, rank, 2, {"m": stage})
    load_step(folder, {"m": target}, rank=0)


def through_dcp(saved: nn.Module, target: nn.Module, folder: Path) -> None:
    """And by torch's own loader, which would say the target's versions otherwise."""
    import torch.distributed.checkpoint as dcp

    from ckpt_engine.dcp.planner import FlyballSavePlanner
    from ckpt_engine.dcp.reader import FlyballReader
    from ckpt_engine.dcp.writer import FlyballWriter

    writer = FlyballWriter(folder / "c")
    dcp.save({"m": saved}, storage_writer=writer, planner=FlyballSavePlanner(), no_dist=True)
    dcp.load({"m": target}, storage_reader=FlyballReader(folder / "c"), no_dist=True)


def through_dcp_and_load_step(saved: nn.Module, target: nn.Module, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from ckpt_engine.dcp.planner import FlyballSavePlanner
    from ckpt_engine.dcp.writer import FlyballWriter

    writer = FlyballWriter(folder / "c")
    dcp.save({"m": saved}, storage_writer=writer, planner=FlyballSavePlanner(), no_dist=True)
    load_step(folder / "c", {"m": target}, rank=0)


WAYS = [
    *(through_a_job, through_a_file, inside_a_file_through_an_adapter, through_a_step_of_stages),
    *(through_dcp, through_dcp_and_load_step),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "expected"), [(Versioned, (2, 7.0)), (Older, (1, 70.0))], ids=["same", "older"])
@pytest.mark.parametrize("way", WAYS)
def test_the_versions_that_saved_a_state_reach_the_modules_that_load_it(
    way: Callable[[nn.Module, nn.Module, Path], None],
    kind: type[Versioned],
    expected: tuple[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path))
    target = model(value=0.0)
    way(model(kind), target, tmp_path)
    assert seen(target) == expected


@pytest.mark.parametrize("strip", [dict, OrderedDict])
def test_a_state_that_names_no_versions_counts_as_saved_by_the_modules_that_load_it(
    strip: type[dict[str, Any]],
) -> None:
    """Of format 1, or flattened by DCP's own planner."""
    target = model(value=0.0)
    restored({"m": strip(model().state_dict().items())}, {"m": target})
    assert seen(target) == (2, 7.0)


@pytest.mark.parametrize("name", ["MinMaxObserver", "MovingAveragePerChannelMinMaxObserver", "HistogramObserver"])
def test_an_observer_keeps_its_eps(name: str) -> None:
    def observer(values: torch.Tensor | None) -> nn.Module:
        made: nn.Module = getattr(quantization, name)(eps=1e-3)
        if values is not None:
            made(values)
        return made

    saved, target = observer(torch.arange(12.0).view(3, 4)), observer(None)
    restored({"m": saved}, {"m": target})
    expected, found = saved.state_dict(), target.state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_state_dict_that_is_filled_says_what_saved_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its values are those of version 1, so whoever loads it must hear that, and not the version of the code here."""
    target = model(value=0.0)
    state = {"m": target.state_dict()}
    restored({"m": model(Older).state_dict()}, state)
    assert "'m' was saved by modules of other versions" in caplog.text
    target.load_state_dict(state["m"])
    assert seen(target) == (1, 70.0)


def test_only_integers_and_strings_of_the_metadata_are_saved() -> None:
    state = OrderedDict(a=1)
    state._metadata = {"": {"version": 3, "by": "me", "fn": print, "x": [1]}, 5: {}, "b": 7}  # type: ignore[attr-defined]
    into: dict[str, Any] = {"m": OrderedDict(a=0)}
    restored({"m": state}, into)
    assert into["m"]._metadata == {"": {"version": 3, "by": "me"}}


def test_a_version_that_changes_between_two_saves_is_saved() -> None:
    """Also where a structure is known, and nothing else has changed."""
    whole = model()
    structure: KeptStructure | None = None
    for version in (2, 2, 3):
        whole[1]["inner"]._version = version  # type: ignore[index]
        before = structure
        flat, structure = take_apart({"m": whole}, structure)
        assert flat.tree == flatten({"m": whole}).tree and f'"1.inner":{{"version":{version}}}' in flat.tree
        assert structure is not None and (structure is before) == (version == 2 and before is not None)
