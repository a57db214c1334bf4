"""A training script: run_way.py WAY FOLDER. Before each save it notes a digest of each part of its state, and after a
restore it compares. It saves as `flyball run` has it do, until somebody ends it.

The digests are made by a walk of its own, from the memory of the state, so that nothing of the engine is trusted."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import xxhash

import flyball

RANK = os.environ["RANK"]


def leaves(value: Any, path: str) -> Iterator[tuple[str, bytes]]:  # noqa: ANN401 - any state
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if hasattr(value, "to_local"):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        # A copy: numpy marks a storage as one that cannot be resized.
        plain = value.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
        yield path, plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    elif isinstance(value, np.ndarray):
        yield path, value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")
    else:
        yield path, repr(value).encode()


def digests(state: Mapping[str, object]) -> dict[str, str]:
    return {path: xxhash.xxh3_128_hexdigest(content) for path, content in leaves(state, "")}


def note(path: Path, content: object) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content))
    new.rename(path)


def main(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(RANK))
    way = importlib.import_module(f"capture_corpus.{name.replace('/', '.')}")
    job = flyball.attach()
    if getattr(way, "RANKS", 1) > 1:
        dist.init_process_group("gloo")
    loop = way.make()
    with loop.lock:
        start = job.restore(loop.state)
        found = digests(loop.state)
    if start:
        expected = json.loads((folder / f"{start - 1}.rank{RANK}").read_text())
        wrong = [path for path in {*expected, *found} if expected.get(path) != found.get(path)]
        with (folder / f"restores.rank{RANK}").open("a") as restores:
            restores.write(json.dumps({"step": start - 1, "wrong": wrong}) + "\n")
    (folder / f"pid.rank{RANK}").write_text(str(os.getpid()))
    for step in range(start, 1 << 30):
        loop.step()
        job.step(step)
        with loop.lock:
            note(folder / f"{step}.rank{RANK}", digests(loop.state))
            job.save(step, loop.state)
        loop.after_save()
        (folder / f"{step - 64}.rank{RANK}").unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
