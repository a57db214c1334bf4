"""Train a small network to read handwritten digits, and go on from the last checkpoint.

    python examples/mnist.py
    python examples/mnist.py --steps 2000 --checkpoint digits.pt

An ordinary script: but for the lines with `flyball.save` and `flyball.load`, it is what it was with `torch.save` and
`torch.load`. Kill it at any moment and start it again. It goes on from the newest save in memory, with the same losses,
to the last bit, as if it had not been killed.

The digits are MNIST's if they are in `--data` (as torchvision leaves them: MNIST/raw/...), else scikit-learn's.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flyball


def read_mnist(folder: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 28, 28) from 0 to 1, and labels (N)."""
    images = (folder / "train-images-idx3-ubyte").read_bytes()
    labels = (folder / "train-labels-idx1-ubyte").read_bytes()
    pixels = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).view(-1, 28, 28)
    return pixels / 255, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()


def read_digits(data: Path) -> tuple[Tensor, Tensor]:
    """MNIST if it is there, else the 1797 digits (8 x 8) that come with scikit-learn."""
    folder = data / "MNIST" / "raw"
    if (folder / "train-images-idx3-ubyte").exists():
        return read_mnist(folder)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit(f"There is no MNIST in {folder}, and scikit-learn is not installed: pip install scikit-learn")
    digits = load_digits()
    return torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--checkpoint", default="mnist.pt")
    parser.add_argument("--losses", help="file to append each step's loss to")
    options = parser.parse_args()

    images, labels = read_digits(options.data)
    torch.manual_seed(0)
    order = torch.Generator().manual_seed(0)
    pixels = images[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    start = 0

    if os.path.exists(options.checkpoint):  # noqa: PTH110 - as most scripts do
        state = flyball.load(options.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        order.set_state(state["order"])
        start = state["step"] + 1
        print(f"goes on from step {start}", flush=True)

    for step in range(start, options.steps):
        batch = torch.randint(len(images), (64,), generator=order)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.losses:
            with Path(options.losses).open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
        if step % options.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            state |= {"rng": torch.get_rng_state(), "order": order.get_state()}
            flyball.save(state, options.checkpoint)

    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean()
    print(f"{right:.1%} of {len(images)} digits are read right", flush=True)


if __name__ == "__main__":
    main()
