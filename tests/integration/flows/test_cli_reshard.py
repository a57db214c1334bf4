"""The same command with another number of ranks resumes from where the others were: real processes, bit for bit."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.flyball import FlyballProcess
from support.commands.run_folders import run_folder

TRAINER = """
import itertools, os, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import flyball

def truth(step):
    return torch.arange(24 * 5000, dtype=torch.float64).reshape(24, 5000).mul_(1.0001).add_(step)

job = flyball.attach()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))

def sharded(step):
    return distribute_tensor(truth(step), mesh, [Shard(0)], src_data_rank=None)

state = {"rows": sharded(-1), "whole": torch.full((1000,), -1.0, dtype=torch.float64), "rank": rank}
begin = job.restore(state)
if begin:
    assert torch.equal(state["rows"].to_local(), sharded(begin - 1).to_local()), "not what was saved"
    assert torch.equal(state["whole"], torch.full((1000,), begin - 1.0, dtype=torch.float64))
for step in itertools.count(begin):
    state["rows"].to_local().copy_(sharded(step).to_local())
    state["whole"].fill_(step)
    job.step(step)
    job.save(step, state)
    with open(f"w{world}-r{rank}.new", "w") as file:
        file.write(f"{begin} {step}")
    os.replace(f"w{world}-r{rank}.new", f"w{world}-r{rank}")
    if os.path.exists("enough"):
        break
    time.sleep(0.02)
job.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for the script and all state; afterwards no process of it is left."""
    with run_folder() as folder:
        (folder / "train.py").write_text(TRAINER)
        yield folder


class Run(FlyballProcess):
    """`flyball run` of the trainer with some ranks."""

    def __init__(self, place: Path, ranks: int) -> None:
        self.ranks = ranks
        words = ("--job", "gpt", "--nproc-per-node", str(ranks), "--shutdown-timeout", "120", "train.py")
        super().__init__(place, "run", *words)

    def steps(self) -> list[tuple[int, int]]:
        """Where each rank began, and its newest step."""
        files = [self.place / f"w{self.ranks}-r{rank}" for rank in range(self.ranks)]
        found = (file.read_text().split() for file in files if file.exists())
        return [(int(begin), int(step)) for begin, step in found]

    def train(self, more: int = 8) -> int:
        """Wait until every rank has made some steps; where they began."""
        self.wait_for(lambda: len(self.steps()) == self.ranks and all(s >= b + more for b, s in self.steps()), "steps")
        (begin,) = {begin for begin, _ in self.steps()}
        return begin


@pytest.mark.proof
def test_four_ranks_save_two_resume_from_disk_and_three_from_memory(place: Path) -> None:
    four = Run(place, 4)
    assert four.train() == 0
    assert four.send(signal.SIGTERM) == 128 + signal.SIGTERM, four.text

    two = Run(place, 2)
    begun = two.train()
    assert begun > 0, two.text
    assert f"resuming from step {begun - 1} (" in two.text
    assert "on 4 ranks, and resharded to 2 (--fresh starts over)" in two.text
    two.kill_everything()

    three = Run(place, 3)
    again = three.train()
    assert again > begun, three.text
    said = re.search(r"resuming from step (\d+) \(memory, verified\)", three.text)
    assert said and int(said[1]) <= again - 1, three.text  # a newer step may be found complete after the line
    assert "on 2 ranks, and resharded to 3 (--fresh starts over)" in three.text
    (place / "enough").touch()
    assert three.end() == 0, three.text
    assert list((place / "shm").iterdir()) == []
