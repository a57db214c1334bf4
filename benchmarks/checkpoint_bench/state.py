"""The state to save: a model and its AdamW state in float32, of a given total size, with real training steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

GPT2_VOCABULARY = 50_257
CONTEXT = 1024  # positions of the model; a step may use fewer
STATE_BYTES_PER_PARAMETER = 12  # the parameter and AdamW's two moments, float32
_WIDTHS = (1024, 768, 512, 256, 128, 64)
_MAX_LAYERS = 12
_HEAD_WIDTH = 64


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD_WIDTH
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] -> the same."""
        batch, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, _HEAD_WIDTH)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2's architecture, with output weights tied to the embedding."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] twice -> mean cross entropy."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model(state_bytes: int) -> GPT:
    """Make a model whose parameters and AdamW moments take `state_bytes`, to within one row of the embedding."""
    parameters = state_bytes // STATE_BYTES_PER_PARAMETER
    width = next((w for w in _WIDTHS if (GPT2_VOCABULARY + CONTEXT) * w <= 0.6 * parameters), _WIDTHS[-1])
    block = 12 * width * width + 13 * width
    fixed = CONTEXT * width + 2 * width
    layers = min(_MAX_LAYERS, max(1, (parameters - fixed - GPT2_VOCABULARY * width) // block))
    vocabulary = (parameters - fixed - layers * block) // width  # fills the rest beside whole blocks
    if vocabulary < 256:
        raise ValueError(f"{state_bytes} bytes are too few for a model; give at least 0.005 GiB")
    return GPT(width, layers, vocabulary)


class Matmuls(nn.Module):
    """A stack of square weights: a step is almost only matrix products."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        width = min(1024, max(32, int((parameters / 4) ** 0.5)))
        count = max(1, parameters // (width * width))
        self.width = width
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] -> a loss."""
        for weight in self.weights:
            x = x @ weight
        return x.square().mean()


class Training:
    """GPT, its optimizer, and steps of forward, backward and AdamW on random tokens."""

    def __init__(self, state_bytes: int) -> None:
        torch.manual_seed(0)
        self.model = self._make_model(state_bytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._generator = torch.Generator().manual_seed(1)
        self.step(16)  # creates the optimizer's state and the gradients' memory

    def _make_model(self, state_bytes: int) -> nn.Module:
        return make_model(state_bytes)

    def _loss(self, rows: int) -> torch.Tensor:
        """Return the loss over `rows` tokens, in sequences of at most 256."""
        length = min(rows, 256)
        shape = (max(1, rows // length), length)
        batch = torch.randint(self.model.vocabulary, shape, generator=self._generator)
        return self.model(batch, batch.roll(-1, 1))

    @property
    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint engine that takes objects."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def state_dict(self) -> dict[str, object]:
        """Return the state for an engine that takes state dicts."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, rows: int) -> float:
        """Run one optimizer step over `rows` tokens or vectors, and return the loss."""
        loss = self._loss(rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return float(loss.detach())

    def tensors(self) -> list[torch.Tensor]:
        return list(tensors_in(self.state_dict))


class MatmulTraining(Training):
    """Training of matrix products alone."""

    def _make_model(self, state_bytes: int) -> nn.Module:
        return Matmuls(state_bytes // STATE_BYTES_PER_PARAMETER)

    def _loss(self, rows: int) -> torch.Tensor:
        return self.model(torch.randn(rows, self.model.width, generator=self._generator))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Return every tensor in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def size_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
