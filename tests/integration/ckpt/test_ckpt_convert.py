"""`flyball ckpt export` and `import`: other libraries read what was exported, and what was imported is what they wrote,
bit for bit. Hostile pickles do nothing, and nothing half-made is left."""

from __future__ import annotations

import io
import json
import os
import pickle  # noqa: TID251 - what hostile checkpoints are made of
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from support.clocks.waits import until
from support.commands.here import run_here
from support.jobs.saved_steps import bytes_of, same, write_step
from support.stores.checkpoint_site import CheckpointSite

from ckpt_engine.contracts.import_wire import ForeignFormat, ImportRequest
from ckpt_engine.format import manifest as manifests
from ckpt_engine.inspect.foreign_sources import find_sources
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.convert.import_child import run_request
from ckpt_engine.trainer.restore.load_shard import read_file
from ckpt_engine.trainer.restore.load_step import load_step
from flyball.contracts import fault_points
from flyball.contracts.errors import CorruptShard, FlyballError, UnsupportedState
from flyball.contracts.on_host.segments import rank_segment

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved") / "g1" / "step3"
    return folder, write_step(folder) | {"rank": 0}


def command(*words: object, code: int = 0) -> dict[str, Any]:
    done = run_here("ckpt", *map(str, words), "-o", "json", environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if code == 0 else {"said": done.stderr}


def export(step: Path, kind: str, to: Path, *extra: object) -> dict[str, Any]:
    return command("export", step, "--format", kind, "--to", to, *extra)


def import_here(*sources: Path, to: Path, entry: str = "model") -> dict[str, Any]:
    """Import without the subprocess. Returns rank 0's state."""
    to.mkdir(exist_ok=True)
    found = find_sources(sources)
    run_request(ImportRequest(found.format, found.files, str(to), "job", 3, entry, 0), lambda _: None)
    return read_file(to / "rank0.safetensors")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_torch_reads_an_exported_state(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    step, truth = saved
    said = export(step, "torch", tmp_path / "out")
    assert said["files"] == ["state.pt"] and said["step"] == 3 and said["job"] == "job"
    found = torch.load(tmp_path / "out/state.pt", weights_only=True)
    assert same(found, truth)
    assert found["model"]["head"].data_ptr() == found["model"]["embedding"].data_ptr(), "tied as before"
    assert names_in(tmp_path) == ["out"]
    assert same(import_here(tmp_path / "out/state.pt", to=tmp_path / "in"), truth)


def test_safetensors_reads_an_exported_state(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    step, truth = saved
    export(step, "safetensors", tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out/state.safetensors")
    for name in ("columns", "rows", "uneven", "replicated", "embedding", "f8"):
        assert bytes_of(found[f"model.{name}"]) == bytes_of(truth["model"][name])
    assert same(import_here(tmp_path / "out/state.safetensors", to=tmp_path / "in"), truth)


def test_dcp_reads_an_exported_checkpoint(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    step, truth = saved
    export(step, "dcp", tmp_path / "out")
    wanted = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in truth["model"].items()},
        "optimizer": {"state": {0: {"step": torch.zeros(()), "exp_avg": torch.zeros(4)}}},
        "pair": None,
        "epoch": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(wanted["model"], dict(truth["model"])) and wanted["epoch"] == 5 and same(wanted["pair"], truth["pair"])
    assert same(wanted["optimizer"]["state"][0], truth["optimizer"]["state"][0])
    assert same(import_here(tmp_path / "out", to=tmp_path / "in"), truth | {"model": dict(truth["model"])})


def test_transformers_rules_hold_for_an_exported_model(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    step, truth = saved
    one = export(step, "hf", tmp_path / "one")
    assert one["files"] == ["model.safetensors"]
    said = export(step, "hf", tmp_path / "several", "--max-file-size", "100")
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(said["files"]) == [*files, "model.safetensors.index.json"] and len(files) > 2
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    found = {}
    for file in files:
        with safetensors.safe_open(tmp_path / "several" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}, "transformers refuses others"
            content = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
        assert {name for name, place in index["weight_map"].items() if place == file} == content.keys()
        found |= content
    assert found.keys() == truth["model"].keys() - {"head"}, "tied weights once, as transformers wants them"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    for name, tensor in safetensors.torch.load_file(tmp_path / "one/model.safetensors").items():
        assert bytes_of(tensor) == bytes_of(found[name])
    assert bytes_of(found["columns"]) == bytes_of(truth["model"]["columns"])
    imported = import_here(tmp_path / "several", to=tmp_path / "in")
    assert imported.keys() == {"model"} and bytes_of(imported["model"]["rows"]) == bytes_of(truth["model"]["rows"])


def test_the_command_imports_in_a_subprocess_and_load_step_loads_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for rank in range(2):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rank": rank}
        torch.save(state, tmp_path / f"rank_{rank}.pt")
    files = [tmp_path / f"rank_{rank}.pt" for rank in range(2)]
    said = command("import", *files, "--to", tmp_path / "llama", "--step", 40)
    folder = tmp_path / "llama/g0/step40"
    assert said["folder"] == str(folder) and said["ranks"] == 2 and said["entries"] == ["model", "optimizer", "rank"]
    for rank in range(2):
        again = torch.nn.Linear(3, 2)
        state = {"model": again, "optimizer": torch.optim.Adam(again.parameters()), "rank": -1}
        load_step(folder, state, rank=rank)
        assert torch.equal(again.weight, model.weight) and state["rank"] == rank
    listed = command("ls", "--dir", tmp_path / "llama")
    assert [step["step"] for step in listed["steps"]] == [40] and listed["steps"][0]["complete"]
    refused = command("import", files[0], "--to", tmp_path / "llama", "--step", 40, code=16)
    assert "is there already" in refused["said"]
    exported = command("export", 40, "--dir", tmp_path / "llama", "--format", "torch", "--to", tmp_path / "out")
    assert exported["generation"] == 0
    assert torch.equal(torch.load(tmp_path / "out/state.pt", weights_only=True)["model"]["weight"], model.weight)


def test_a_step_is_exported_from_the_memory_of_the_hosts(tmp_path: Path) -> None:
    step, site = tmp_path / "saved", CheckpointSite(tmp_path)
    truth = write_step(step, (2,)) | {"rank": 0}
    for rank, host in enumerate(site.hosts):
        payload = (step / f"rank{rank}.safetensors").read_bytes()
        lines = (step / f"rank{rank}.manifest").read_bytes()
        segments = RankSegments.open(rank_segment(site.prefix(host), "job", rank), create=True)
        segments.begin_write(0, 1, 3, len(payload))[:] = payload
        segments.mark_captured(0)
        assert segments.commit(segments.control.slot(0), manifests.content_of_file(lines, ""))
        segments.close()
    said = site.json("export", "latest", "--format", "torch", "--to", str(tmp_path / "out"))
    assert (said["step"], said["generation"]) == (3, 1)
    assert same(torch.load(tmp_path / "out/state.pt", weights_only=True), truth)


def test_exports_that_make_no_sense_are_refused(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    step, _ = saved
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    arguments = ("export", step, "--to")
    assert "not empty" in command(*arguments, tmp_path / "full", "--format", "torch", code=16)["said"]
    assert "no format 'onnx'" in command(*arguments, tmp_path / "out", "--format", "onnx", code=2)["said"]
    said = command(*arguments, tmp_path / "out", "--format", "hf", "--entry", "net", code=8)["said"]
    assert "'model', 'optimizer'" in said
    missing = command("export", tmp_path / "missing/step1", "--to", tmp_path / "o", "--format", "hf", code=8)
    assert "no folder" in missing["said"]
    assert names_in(tmp_path) == ["full"]


@pytest.mark.parametrize("damage", ["a flipped byte", "a missing rank"])
def test_a_damaged_step_is_not_exported(tmp_path: Path, saved: tuple[Path, dict[str, Any]], damage: str) -> None:
    step = shutil.copytree(saved[0], tmp_path / "g1/step3")
    if damage == "a missing rank":
        for path in step.glob("rank2.*"):
            path.unlink()
    else:
        content = bytearray((step / "rank1.safetensors").read_bytes())
        content[-1] ^= 1  # of a tensor of bytes, which only rank 1's shard would show
        content[5000] ^= 1
        (step / "rank1.safetensors").write_bytes(content)
    for kind in ("torch", "dcp", "safetensors"):
        code = 23 if damage == "a missing rank" else 21
        command("export", step, "--format", kind, "--to", tmp_path / kind, code=code)
    assert names_in(tmp_path) == ["g1"]


# --- hostile ---


class Attack:
    """Unpickled without care, it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def hostile(kind: str, folder: Path, proof: Path) -> Path:
    if kind == "torch.save":
        torch.save({"model": torch.ones(2), "x": Attack(proof)}, folder / "ckpt.pt")
        return folder / "ckpt.pt"
    if kind == "torch.save, old":
        torch.save({"x": Attack(proof)}, folder / "ckpt.pt", _use_new_zipfile_serialization=False)
        return folder / "ckpt.pt"
    place = folder / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"x": torch.ones(2), "y": 1}, checkpoint_id=place, no_dist=True)
    if kind == "metadata":
        (place / ".metadata").write_bytes(pickle.dumps(Attack(proof)))
    elif kind == "a value":
        buffer = io.BytesIO()
        torch.save(Attack(proof), buffer)
        info = {"length": len(buffer.getvalue()), "offset": 0}
        (place / "evil.distcp").write_bytes(buffer.getvalue())
        change(place, lambda metadata: repoint(metadata, "y", "evil.distcp", **info))
    else:
        (folder / "outside").write_bytes(b"secret")
        change(place, lambda metadata: repoint(metadata, "y", "../outside", offset=0, length=6))
    return place


def change(place: Path, edit: Callable[[Any], None]) -> None:
    metadata = pickle.loads((place / ".metadata").read_bytes())
    edit(metadata)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


def repoint(metadata: Any, fqn: str, file: str, **info: int) -> None:  # noqa: ANN401
    for index, entry in metadata.storage_data.items():
        if index.fqn == fqn:
            entry.relative_path = file
            for name, value in info.items():
                setattr(entry, name, value)


@pytest.mark.parametrize("kind", ["torch.save", "torch.save, old", "metadata", "a value", "a path"])
def test_a_hostile_checkpoint_runs_nothing(tmp_path: Path, kind: str) -> None:
    proof = tmp_path / "proof"
    source = hostile(kind, tmp_path, proof)
    with pytest.raises((CorruptShard, UnsupportedState)) as caught:
        import_here(source, to=tmp_path / "in")
    assert not proof.exists() and caught.value.hint
    assert not list((tmp_path / "in").iterdir()), "and leaves nothing"


def test_the_command_says_why_a_hostile_checkpoint_is_refused(tmp_path: Path) -> None:
    source = hostile("torch.save", tmp_path, tmp_path / "proof")
    said = command("import", source, "--to", tmp_path / "in", code=22)["said"]
    assert "more than tensors and plain values" in said and "posix.system" in said
    assert not (tmp_path / "proof").exists() and not list((tmp_path / "in").iterdir())


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp", "hf"])
def test_what_was_cut_off_is_refused(tmp_path: Path, saved: tuple[Path, dict[str, Any]], kind: str) -> None:
    export(saved[0], kind, tmp_path / "out")
    for file in sorted((tmp_path / "out").iterdir()):
        whole = file.read_bytes()
        for size in {0, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:size])
            source = tmp_path / "out" if kind in ("dcp", "hf") else file
            with pytest.raises(FlyballError):
                import_here(source, to=tmp_path / "in")
            shutil.rmtree(tmp_path / "in", ignore_errors=True)
        file.write_bytes(whole)
        if kind == "dcp" and file.name != ".metadata":
            break  # they are alike


def test_only_the_files_of_one_checkpoint_are_imported(tmp_path: Path) -> None:
    torch.save({"x": 1}, tmp_path / "a.pt")
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "b.safetensors")
    (tmp_path / "text").write_text("hello")
    for sources, said in (
        (["a.pt", "b.safetensors"], "different formats"),
        (["text"], "neither of torch.save"),
        (["missing"], "There is no"),
    ):
        with pytest.raises(FlyballError, match=said):
            find_sources([tmp_path / name for name in sources])
    assert find_sources([tmp_path / "a.pt"]).format is ForeignFormat.TORCH


@pytest.mark.parametrize(
    "name", ["c.pt", "latest_checkpointed_iteration.txt", "model.safetensors.index.json", ".metadata"]
)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    os.mkfifo(folder / name)
    with pytest.raises(FlyballError, match="not a regular file"):
        find_sources([folder / name] if name == "c.pt" else [folder])


def test_a_link_to_a_device_is_refused_and_one_to_a_file_is_not(tmp_path: Path) -> None:
    """A cache of a hub has links to its files."""
    torch.save({"x": 1}, tmp_path / "blob")
    (tmp_path / "a.pt").symlink_to("blob")
    (tmp_path / "b.pt").symlink_to("/dev/zero")
    assert find_sources([tmp_path / "a.pt"]).files == (str(tmp_path / "blob"),)
    with pytest.raises(FlyballError, match="not a regular file"):
        find_sources([tmp_path / "b.pt"])


# --- killed, and full disks ---

KILLED = """
import sys
from pathlib import Path
from flyball.cli.main import run_cli
sys.exit(run_cli(["ckpt", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_killed_export_leaves_nothing_that_looks_whole(
    tmp_path: Path, saved: tuple[Path, dict[str, Any]], kind: str
) -> None:
    words = ["export", str(saved[0]), "--format", kind, "--to", str(tmp_path / "out")]
    if kind == "safetensors":
        environment = {**os.environ, "PYTHONPATH": str(ROOT), fault_points.VARIABLE: "file.rename"}
        killed = subprocess.run([sys.executable, "-c", KILLED, *words], env=environment, timeout=300, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists() and list(tmp_path.glob(".out.new.*"))
    export(saved[0], kind, tmp_path / "out")
    assert names_in(tmp_path) == ["out"], "the next one removes what the killed one left"


def test_a_killed_import_leaves_nothing_that_counts(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.arange(1 << 22)}}, tmp_path / "ckpt.pt")
    words = ["import", str(tmp_path / "ckpt.pt"), "--to", str(tmp_path / "in"), "--step", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, *words], env=environment)
    until(lambda: process.poll() is not None or list((tmp_path / "in").glob("*/*")))
    process.kill()
    assert process.wait(300) == -signal.SIGKILL
    left = names_in(tmp_path / "in")
    assert len(left) == 1 and left[0].startswith("."), "begun, and without a name"
    assert "no checkpoints of any job" in command("ls", "--dir", tmp_path / "in", code=8)["said"]
    command(*words)
    assert names_in(tmp_path / "in") == ["g0"], "the next one removes what the killed one left"
    state = {"model": {"w": torch.zeros(1 << 22, dtype=torch.int64)}}
    load_step(tmp_path / "in/g0/step3", state, rank=0)
    assert torch.equal(state["model"]["w"], torch.arange(1 << 22))


def test_a_full_disk_is_a_clear_error(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    state = tmp_path / "large.pt"
    torch.save({"x": torch.ones(1 << 20)}, state)
    script = f"""if True:
    import os, sys
    from flyball.cli.main import run_cli
    assert run_cli(["ckpt", "import", {str(state)!r}, "--to", {str(folder)!r}]) == 6
    assert os.listdir({str(folder)!r}) == [], os.listdir({str(folder)!r})
    for kind in ("torch", "dcp", "safetensors", "hf"):
        assert run_cli(["ckpt", "export", {str(saved[0])!r}, "--format", kind, "--to", {str(folder / "out")!r}]) == 6
    assert os.listdir({str(folder)!r}) == [], os.listdir({str(folder)!r})
    """
    mount = f"mount -t tmpfs -o size=1m none {folder} || exit 77"
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", f'{mount}; exec {sys.executable} -c "$0"', script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("free space") >= 5
