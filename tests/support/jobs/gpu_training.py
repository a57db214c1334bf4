"""A training on a GPU for tests: a state with everything that a copy may treat in its own way, and its bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.state.state_tree import flatten
from flyball.sdk.trainer import Job

BUSY_CYCLES = 1_000_000_000  # of the GPU's clock: half a second


def keep_busy() -> torch.cuda.Event:
    """Queue work that takes a while, so that what is queued behind it has certainly not begun. The event is its end."""
    torch.cuda._sleep(BUSY_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


class Net(nn.Module):
    """Matrices in float32 and bfloat16, a convolution whose memory lies otherwise, and buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(width)
        self.conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        self.register_buffer("average", torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(torch.relu(self.first(self.norm(x))).bfloat16()).float()
        with torch.no_grad():
            self.average.mul_(0.9).add_(out.T @ out, alpha=0.1)
        return out.square().mean() + self.conv.weight.square().mean()


class Training:
    """Steps of a Net. `state` also has tensors of kinds that no optimizer has."""

    def __init__(self, width: int = 2048, **options: bool) -> None:
        torch.manual_seed(0)
        self.model = Net(width).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.inputs = torch.randn(64, width, device="cuda")
        self.extra = {
            "strided": torch.randn(512, 512, device="cuda")[:, ::2],
            "transposed": torch.randn(300, 700, device="cuda").T,
            "complex": torch.randn(64, 64, device="cuda", dtype=torch.complex64),
            "float8": torch.randn(4096, device="cuda").to(torch.float8_e4m3fn),
            "empty": torch.empty(0, 3, device="cuda"),
            "scalar": torch.tensor(2.5, device="cuda", dtype=torch.float64),
            "host": torch.randn(100, 100),
            "negative": torch.complex(torch.zeros(9, 9), torch.ones(9, 9)).cuda().conj().imag,
        }

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.inputs).backward()
        self.optimizer.step()


def contents(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all tensors, as they are when the device gets there."""
    return {name: tensor.detach().clone() for name, tensor in flatten(state).tensors.items()}


def saved_tensors(job: Job, step: int) -> dict[str, torch.Tensor]:
    """What the job's slot of this step has, read with the safetensors library."""
    from safetensors.torch import load

    segments = job._engine._segments
    assert isinstance(segments, RankSegments)
    (view,) = [slot for slot in segments.slots() if slot.step == step]
    return load(bytes(segments.payload(view.index)))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Byte for byte."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        one, other = (t.cpu().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(one, other), name
