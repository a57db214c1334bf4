"""Train a small GPT on the source code of Python's standard library, byte by byte.

    python examples/train_gpt.py                                     one process
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py   several, without Flyball
    flyball run --nproc-per-node 2 examples/train_gpt.py             several; a dead worker costs a second and no step

Everything that Flyball needs from a script is in `train`: attach, restore, step, save.

Two runs with the same seed, number of ranks and threads per rank have the same losses to the last bit, even if one was
interrupted and restored. All randomness comes from seeded generators, whose state is saved. DistributedDataParallel
would still spoil it: after its first iteration it reorders its gradient buckets, so a ring all-reduce over more than
two ranks adds gradients in another order, and a restored process starts with the first order again. With
find_unused_parameters=True the buckets stay as they are.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flyball

VOCABULARY = 256  # bytes
GOOGLE_FLAGS = (  # of Google's resiliency library; `flyball run` understands them
    ("--enable-optimized-async-ckpt", "copy to shared memory, and let the engine do the rest"),
    ("--local-ckpt-dir", "folder for checkpoints on this host's disk"),
    ("--local-ckpt-interval", "steps between them"),
    ("--persistent-ckpt-dir", "folder for checkpoints that outlive every host"),
    ("--persistent-ckpt-interval", "steps between them"),
)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + hidden


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class StandardLibrary:
    """Random windows of the standard library's source; each rank gets its own sequence."""

    def __init__(self, batch_size: int, context: int, seed: int, rank: int, limit_bytes: int = 4_000_000) -> None:
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(module.read_bytes() for module in modules)[:limit_bytes]
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch_size, self.context = batch_size, context
        self.generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.data) - self.context, (self.batch_size,), generator=self.generator)
        windows = torch.stack([self.data[start : start + self.context + 1] for start in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])


class LossLog:
    """One line per step and rank: `step loss generation`. The loss is a hexadecimal float, so nothing is rounded."""

    def __init__(self, folder: str, rank: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.file = (Path(folder) / f"rank{rank}.txt").open("a", buffering=1)

    def write(self, step: int, loss: float, generation: int) -> None:
        self.file.write(f"{step} {loss.hex()} {generation}\n")


def train(options: argparse.Namespace) -> None:
    job = flyball.attach()
    device = set_up(job.world_size)
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    data = StandardLibrary(options.batch_size, options.context, options.seed, job.rank)
    losses = LossLog(options.losses_dir, job.rank) if options.losses_dir else None
    network = (
        nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if dist.is_initialized() else model
    )

    start = job.restore({"model": model, "optimizer": optimizer, "data": data})
    for step in range(start, options.steps):
        tokens, targets = data.batch()
        loss = network(tokens.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if losses:
            losses.write(step, loss.item(), job.generation)
        job.step(step, loss=loss.detach())
        job.save(step, {"model": model, "optimizer": optimizer, "data": data})
        if job.rank == 0 and step % options.print_every == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)

    job.close()
    if dist.is_initialized():
        dist.barrier()  # else a rank that leaves early resets connections of the others' last step
        dist.destroy_process_group()


def set_up(world_size: int) -> torch.device:
    """Set up the process group if there are several ranks; return this rank's device."""
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic sums
        torch.use_deterministic_algorithms(True)
        torch.cuda.set_device(local_rank)
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    return torch.device("cuda", local_rank) if cuda else torch.device("cpu")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=2, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--losses-dir", default="", metavar="DIR", help="append every loss, exactly, to DIR/rank<R>.txt"
    )
    ours = parser.add_argument_group("checkpoint flags of `flyball run`; accepted here, so that old command lines work")
    for flag, meaning in GOOGLE_FLAGS:
        if flag.startswith("--enable"):
            ours.add_argument(flag, action="store_true", help=meaning)
        else:
            ours.add_argument(flag, type=int if flag.endswith("interval") else str, help=meaning)
    options = parser.parse_args(arguments)
    given = [flag for flag, _ in GOOGLE_FLAGS if getattr(options, flag[2:].replace("-", "_"))]
    if given and os.environ.get("RANK", "0") == "0":
        print(
            f"train_gpt: {', '.join(given)} have no effect here: give them to `flyball run`, before the script",
            file=sys.stderr,
        )
    return options


if __name__ == "__main__":
    train(parse(sys.argv[1:]))
