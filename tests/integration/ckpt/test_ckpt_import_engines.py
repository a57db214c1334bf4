"""`flyball ckpt import` of what other engines wrote (`tests/foreign_checkpoints`): the values are theirs, bit for bit;
what is not complete is refused with what it lacks; and nothing that a file names is run."""

from __future__ import annotations

import io
import json
import os
import pickle  # noqa: TID251 - what hostile checkpoints are made of
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands.here import run_here
from support.jobs.saved_steps import same
from support.stores.kept_json import of_json

from ckpt_engine.contracts.import_wire import ImportRequest
from ckpt_engine.inspect.foreign_sources import Sources, find_sources
from ckpt_engine.trainer.convert.import_child import run_request
from ckpt_engine.trainer.restore.load_shard import read_file
from ckpt_engine.trainer.restore.load_step import load_step
from flyball.contracts.errors import CorruptShard, FlyballError, NotFound, UnsupportedState, UsageError

ROOT = Path(__file__).parents[3]
KEPT = Path(__file__).parents[2] / "foreign_checkpoints"
DLROVER, NVIDIA = KEPT / "dlrover-0.6.1", KEPT / "nvidia-0.4.1"


def truth(folder: Path) -> Any:  # noqa: ANN401 - any state
    return of_json(json.loads((folder / "truth.json").read_text()))


def import_here(sources: Sources, to: Path) -> list[dict[str, Any]]:
    """Import without the subprocess. Returns the states of all ranks."""
    to.mkdir(exist_ok=True)
    run_request(ImportRequest(sources.format, sources.files, str(to), "job", 3, "model", 0), lambda _: None)
    return [read_file(to / f"rank{rank}.safetensors") for rank in range(len(list(to.glob("*.safetensors"))))]


def as_compared(value: Any) -> Any:  # noqa: ANN401 - any state
    """Arrays as tensors, which `same` compares bit for bit; dicts in one order."""
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value)}
    if isinstance(value, dict):
        return {key: as_compared(value[key]) for key in sorted(value, key=str)}
    if type(value) in (list, tuple):
        return type(value)(map(as_compared, value))
    return value


@pytest.mark.parametrize(("kept", "size"), [("ddp", 1), ("fsdp", 1), ("megatron", 1)])
def test_what_dlrover_wrote_is_read_bit_for_bit(tmp_path: Path, kept: str, size: int) -> None:
    """FSDP's tensors become whole; Megatron's arguments plain values."""
    found = find_sources([DLROVER / kept])
    assert found.step == 40 and len(found.files) == size
    (state,) = import_here(found, tmp_path / "in")
    assert same(as_compared(state), as_compared(truth(DLROVER / kept)))


def test_what_nvidias_extension_wrote_is_read_bit_for_bit_and_loaded_by_rank(tmp_path: Path) -> None:
    words = ["ckpt", "import", str(NVIDIA), "--to", str(tmp_path / "in"), "-o", "json"]
    done = run_here(*words, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ranks"] == 2 and said["folder"].endswith("g0/step40")
    for rank, expected in enumerate(truth(NVIDIA)):
        state = {**expected, "model": {name: torch.zeros_like(one) for name, one in expected["model"].items()}}
        load_step(Path(said["folder"]), state, rank=rank)
        assert same(state["model"], expected["model"])
        assert same(read_file(Path(said["folder"]) / f"rank{rank}.safetensors"), expected)


def test_another_step_than_the_newest_is_named_by_its_number_or_its_folder(tmp_path: Path) -> None:
    for found in (find_sources([DLROVER / "ddp"], 20), find_sources([DLROVER / "ddp" / "20"])):
        assert found.step == 20 and found.files[0].endswith("20/rank_0.pt")
    with pytest.raises(NotFound, match="no folder of step 30"):
        find_sources([DLROVER / "ddp"], 30)
    with pytest.raises(NotFound, match="at step 30; there are: 40 of ranks 0, 1"):
        find_sources([NVIDIA], 30)


# --- not complete ---


def test_a_tracker_file_that_is_ahead_of_its_files_is_found_out(tmp_path: Path) -> None:
    """DLRover's saver of FSDP names a step before all of its files are there."""
    folder = shutil.copytree(DLROVER / "fsdp", tmp_path / "fsdp")
    (folder / "40" / "__1_0.distcp").unlink()
    with pytest.raises(CorruptShard, match=r"There is no .*__1_0.distcp"):
        import_here(find_sources([folder]), tmp_path / "in")
    shutil.copyfile(DLROVER / "fsdp/40/__0_0.distcp", folder / "40/__1_0.distcp")
    with pytest.raises(CorruptShard, match="ends before the end"):
        import_here(find_sources([folder]), tmp_path / "in")
    shutil.rmtree(folder / "40")
    with pytest.raises(NotFound, match=r"no folder of step 40, which dlrover_latest.txt names"):
        find_sources([folder])
    (folder / "dlrover_latest.txt").write_text("")
    with pytest.raises(CorruptShard, match="names no step"):
        find_sources([folder])


def nvidia_files(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        rank = int(name.split("_")[-2])
        shutil.copyfile(NVIDIA / f"llama/{rank}/iter_0000040_{rank}_local.pt", root / name)
    return root


def test_a_local_step_is_taken_only_if_every_rank_has_it(tmp_path: Path) -> None:
    one = nvidia_files(
        tmp_path / "one/llama",
        *("0/iter_0000050_0_local.pt", "0/iter_0000040_0_local.pt", "1/iter_0000040_1_local.pt"),
        "1/iter_0000050_1_local.dirty.pt",
    )
    found = find_sources([one])
    assert found.step == 40 and [Path(name).parent.name for name in found.files] == ["0", "1"]
    with pytest.raises(NotFound, match="No step has the files of all 2 ranks at step 50"):
        find_sources([one], 50)


def test_the_folders_of_several_hosts_and_copies_of_other_ranks_make_one_step(tmp_path: Path) -> None:
    a = nvidia_files(tmp_path / "a", "llama/0/iter_0000040_0_local.pt", "llama/0/iter_0000040_1_local.pt")
    assert len(find_sources([a]).files) == 2, "rank 1's copy in rank 0's folder counts"
    b = nvidia_files(tmp_path / "b", "llama/1/iter_0000040_1_local.pt")
    assert [Path(name).parts[-4] for name in find_sources([a, b]).files] == ["a", "b"], "its own is preferred"
    other = nvidia_files(tmp_path / "b", "qwen/1/iter_0000040_1_local.pt")
    with pytest.raises(UsageError, match="several sessions: llama, qwen"):
        find_sources([other])
    with pytest.raises(UsageError, match="are both of rank 1 itself"):
        find_sources([b / "llama", b / "qwen"])


def test_each_host_s_folder_may_have_another_name(tmp_path: Path) -> None:
    """A session's, or the root if there are no sessions, which is what the extension makes by default."""
    a = nvidia_files(tmp_path / "host-a", "0/iter_0000040_0_local.pt")
    b = nvidia_files(tmp_path / "host-b", "1/iter_0000040_1_local.pt")
    for folders in ([a, b], [a / "0", b / "1"], [b, a, b]):
        found = find_sources(folders)
        assert found.step == 40 and [Path(name).parts[-3] for name in found.files] == ["host-a", "host-b"]


def test_folders_that_only_look_like_a_checkpoint_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").touch()
    with pytest.raises(UsageError, match="is no folder of DCP"):
        find_sources([tmp_path])
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": 5}}')
    with pytest.raises(CorruptShard, match=r"index.json does not parse: TypeError"):
        find_sources([tmp_path])
    too_many = "9" * 16  # more than a step may have
    (tmp_path / "dlrover_latest.txt").write_text(too_many)
    (tmp_path / too_many).mkdir()
    with pytest.raises(CorruptShard, match="names no step"):
        find_sources([tmp_path])


def test_megatrons_ranks_are_in_its_order_and_all_there(tmp_path: Path) -> None:
    place = tmp_path / "iter_0000040"
    for name in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"):
        shutil.copytree(DLROVER / "megatron/iter_0000040/mp_rank_00", place / name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40\n")
    found = find_sources([tmp_path])
    assert [Path(name).name[-6:] for name in found.files] == ["00_000", "01_000", "00_001", "01_001"]
    (place / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(CorruptShard, match=r"lacks model_optim_rng.pt of tensor, pipeline and expert rank 1, 1, 0"):
        find_sources([tmp_path])


# --- hostile, and other ---


class Attack:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def write_with(pickled: bytes, to: Path) -> Path:
    """A file of torch.save with another pickle."""
    torch.save({"x": 1}, content := io.BytesIO())
    with zipfile.ZipFile(content) as real, zipfile.ZipFile(to, "w") as made:
        for name in real.namelist():
            made.writestr(name, pickled if name.endswith("data.pkl") else real.read(name))
    return to


STATE = "nvidia_resiliency_ext.checkpointing.local.basic_state_dict.BasicTensorAwareStateDict"
HOSTILE = {
    "called with something": (f"\x80\x02c{STATE.rpartition('.')[0]}\n{STATE.rpartition('.')[2]}\n", b"(K\x01tR."),
    "without a state": (f"\x80\x02c{STATE.rpartition('.')[0]}\n{STATE.rpartition('.')[2]}\n", b")\x81."),
    "an array of another class": (
        f"\x80\x02cnumpy._core.multiarray\n_reconstruct\nc{STATE.rpartition('.')[0]}\n{STATE.rpartition('.')[2]}\n",
        b"K\x00\x85U\x01b\x87R.",
    ),
    "another class of the engine": (
        "\x80\x02cnvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager\nLocalCheckpointManager\n",
        b")\x81.",
    ),
    "a function of numpy": ("\x80\x02cnumpy\nload\n", b"(X\x01\x00\x00\x00xtR."),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_names_that_are_known_run_nothing_and_others_are_refused(tmp_path: Path, kind: str) -> None:
    head, tail = HOSTILE[kind]
    source = write_with(head.encode("latin1") + tail, tmp_path / "ckpt.pt")
    with pytest.raises((CorruptShard, UnsupportedState)) as caught:
        import_here(find_sources([source]), tmp_path / "in")
    assert caught.value.hint and not list((tmp_path / "in").iterdir())
    if kind == "another class of the engine":
        assert "LocalCheckpointManager" in caught.value.message


def test_an_attack_inside_of_an_engines_files_runs_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    torch.save({"model": torch.ones(2), "args": Attack(proof)}, nvidia_place := tmp_path / "iter_0000040_0_local.pt")
    folder = shutil.copytree(DLROVER / "fsdp", tmp_path / "fsdp")
    (folder / "40/.metadata").write_bytes(pickle.dumps(Attack(proof)))
    for source in (nvidia_place, folder):
        with pytest.raises((CorruptShard, UnsupportedState), match=r"posix.system|posix"):
            import_here(find_sources([source]), tmp_path / "in")
    assert not proof.exists()


@pytest.mark.parametrize("kept", ["ddp/40/rank_0.pt", "fsdp/40/.metadata", "fsdp/40/__0_0.distcp"])
def test_what_was_cut_off_is_refused(tmp_path: Path, kept: str) -> None:
    shutil.copytree(DLROVER, tmp_path / "all")
    file = tmp_path / "all" / kept
    whole = file.read_bytes()
    for size in (0, len(whole) // 4):  # its saver of FSDP writes more than it uses
        file.write_bytes(whole[:size])
        with pytest.raises(FlyballError):
            import_here(find_sources([tmp_path / "all" / kept.partition("/")[0]]), tmp_path / "in")
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
