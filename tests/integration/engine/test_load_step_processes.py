"""Real gloo processes train whole models, with FSDP2, tensor parallelism or both, save a step, and other numbers of
processes load it into other layouts: what they hold together equals the unsharded truth, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands.warm_python import WarmPython
from support.jobs.sharded_models import MODELS, run_ranks

SCRIPT = """
from ckpt_engine.format import manifest as manifests
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.restore.load_step import load_step

phase, layout, folder, truth = sys.argv[1:]
model, optimizer = build(layout)
state = {"model": model, "optimizer": optimizer, "epoch": 5}
if phase == "save":
    train(model, optimizer)
    found = everything(model, optimizer)
    prepared = Capturer().take(state)
    payload = memoryview(bytearray(prepared.payload_bytes))
    prepared.copy_into(0, payload)
    manifest = manifests.describe(
        payload, job="job", generation=1, step=2, rank=rank, world_size=world, code_version="t", chunk_bytes=256
    )
    with open(f"{folder}/rank{rank}.safetensors", "wb") as file:
        file.write(payload)
    with open(f"{folder}/rank{rank}.manifest", "wb") as file:
        file.write(manifests.as_file(manifests.encode(manifest)))
    if rank == 0:
        torch.save(found, truth)
else:
    if phase == "load_stepped":
        train(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    state["epoch"] = 0
    load_step(folder, state, rank=rank)
    expected = torch.load(truth, weights_only=True)
    found = everything(model, optimizer)
    assert state["epoch"] == 5

    compare(found, expected, "")
    train(model, optimizer)  # and it trains on
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("fsdp", 4), [("fsdp", 2), ("tp", 2), ("plain", 1)]),
        pytest.param(("tp", 2), [("fsdp", 3), ("fsdp2x2", 4)], marks=pytest.mark.proof),
        pytest.param(("fsdp2x2", 4), [("fsdp", 2), ("tp", 2)], marks=pytest.mark.proof),
        pytest.param(("plain", 2), [("fsdp", 3), ("fsdp2x2", 4)], marks=pytest.mark.proof),
    ],
    ids=["fsdp", "tp", "fsdp-of-tp", "plain"],
)
def test_what_one_layout_saved_another_loads(
    warm_python: WarmPython, tmp_path: Path, saved: tuple[str, int], loaded: list[tuple[str, int]]
) -> None:
    folder, truth = tmp_path / "step2", tmp_path / "truth.pt"
    folder.mkdir()

    def run(phase: str, layout: str, world: int) -> None:
        rendezvous = tmp_path / f"{phase}-{layout}-{world}"
        run_ranks(
            warm_python, MODELS + SCRIPT, phase, layout, str(folder), str(truth), world=world, rendezvous=rendezvous
        )

    run("save", *saved)
    for number, (layout, world) in enumerate(loaded):
        run(("load", "load_stepped")[number % 2], layout, world)
