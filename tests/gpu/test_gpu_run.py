"""`flyball run` with workers that compute on a GPU: killed in the middle of a copy, and hanging in a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.flyball import run_flyball
from support.commands.run_folders import run_folder

TIMEOUT_S = 150.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder
        assert list((folder / "shm").iterdir()) == []


def run(place: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`flyball run`, with the slots in real shared memory."""
    return run_flyball(place, "run", *words, **environ)


TRAINS = """
import os, signal, sys, torch, flyball
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
torch.backends.cuda.matmul.allow_tf32 = False
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(2048, 8192), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(8192, 2048)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
job = flyball.attach()
state = {"model": model, "optimizer": optimizer, "random": torch.cuda.get_rng_state()}
start = job.restore(state)
torch.cuda.set_rng_state(state["random"])
for step in range(start, 12):
    inputs = torch.randn(64, 2048, generator=torch.Generator().manual_seed(step)).cuda()
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    with open(sys.argv[1], "a") as file:
        file.write(f"{step} {loss.item().hex()} {job.generation}\\n")
    job.step(step, loss=loss)
    dies = len(sys.argv) > 2 and step == 7 and job.generation == 1
    if dies:
        assert job.wait_until_finished(60.0)
        torch.cuda._sleep(4_000_000_000)  # two seconds: the copy cannot have ended
    state["random"] = torch.cuda.get_rng_state()
    handle = job.save(step, state)
    if dies:
        assert not handle.staged and not handle.error
        os.kill(os.getpid(), signal.SIGKILL)
job.close()
"""


def losses_in(path: Path) -> dict[int, dict[int, str]]:
    """step -> generation -> loss."""
    found: dict[int, dict[int, str]] = {}
    for line in path.read_text().splitlines():
        step, loss, generation = line.split()
        found.setdefault(int(step), {})[int(generation)] = loss
    return found


def test_a_worker_killed_in_the_middle_of_a_copy_goes_on_from_the_step_before_with_the_same_losses(place: Path) -> None:
    (place / "train.py").write_text(TRAINS)
    subprocess.run([sys.executable, "train.py", "alone.txt"], check=True, cwd=place, timeout=TIMEOUT_S)
    done = run(place, "train.py", str(place / "killed.txt"), "dies")
    assert done.returncode == 0, done.stderr
    alone, killed = losses_in(place / "alone.txt"), losses_in(place / "killed.txt")
    assert list(killed) == list(range(12))
    first = {step for step, losses in killed.items() if 1 in losses}
    second = {step for step, losses in killed.items() if len(losses) - (1 in losses)}
    assert first == set(range(8)) and second == set(range(7, 12)), "step 7 was torn, step 6 was whole"
    for step, losses in killed.items():
        assert set(losses.values()) == set(alone[step].values()), step


KILLS_THE_EXAMPLE = """
import os, runpy, signal, sys, threading, time
losses, example = sys.argv[1:3]
def watch():
    while not os.path.exists(f"{losses}/rank0.txt") or len(open(f"{losses}/rank0.txt").readlines()) < 20:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
if not os.path.exists(losses):
    threading.Thread(target=watch, daemon=True).start()
sys.argv = [example, "--steps", "40", "--losses-dir", losses]
runpy.run_path(example, run_name="__main__")
"""


def test_the_example_is_killed_on_a_gpu_and_goes_on(place: Path) -> None:
    (place / "kills.py").write_text(KILLS_THE_EXAMPLE)
    subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "40", "--losses-dir", "alone"],
        check=True,
        cwd=place,
        timeout=TIMEOUT_S,
    )
    done = run(place, "--nproc-per-node", "gpu", "kills.py", str(place / "killed"), str(EXAMPLE))
    assert done.returncode == 0, done.stderr
    alone, killed = losses_in(place / "alone" / "rank0.txt"), losses_in(place / "killed" / "rank0.txt")
    assert list(killed) == list(range(40))
    assert len({generation for losses in killed.values() for generation in losses}) == 2
    for step, losses in killed.items():
        assert set(losses.values()) == set(alone[step].values()), step


SPINS = """
import os, torch, flyball
job = flyball.attach()
torch.ones(9, device="cuda").sum().item()
for step in range(job.restore({"n": torch.zeros(1)}), 40):
    job.step(step)
    job.save(step, {"n": torch.zeros(1)})
    if step == 20 and job.generation == 1:
        torch.cuda._sleep(1 << 45)
        torch.cuda.synchronize()
"""


def test_a_rank_whose_kernel_never_ends_is_restarted_at_the_hang_timeout(place: Path) -> None:
    (place / "train.py").write_text(SPINS)
    done = run(place, "--hang-timeout", "5", "train.py")
    assert done.returncode == 0, done.stderr
    assert "at most 5.0 s were expected (--hang-timeout)" in done.stderr, done.stderr


FULL = """
import torch
torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
"""


def test_a_lack_of_gpu_memory_is_named(place: Path) -> None:
    (place / "train.py").write_text(FULL)
    done = run(place, "--max-restarts", "1", "train.py", OUT=os.devnull)
    assert done.returncode != 0
    assert "CUDA out of memory" in done.stderr and "Next step: " in done.stderr
    assert "GPU memory" in done.stderr.partition("error: ")[2], done.stderr
