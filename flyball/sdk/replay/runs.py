"""Run a part of a training again from the same state, and leave no trace of it. What it computed is kept as digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
import xxhash

from ckpt_engine.trainer.state import state_tree
from ckpt_engine.trainer.tensor_bytes import bytes_in_place
from flyball.contracts.errors import UsageError

Digests: TypeAlias = Mapping[str, str]  # by the name of what was computed


class RandomState(msgspec.Struct, frozen=True):
    """Of torch's generators: the host's, and the current GPU's (b'': none is in use)."""

    host: bytes
    device: bytes = b""

    @staticmethod
    def now() -> RandomState:
        has_device = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = _bytes_of(torch.cuda.get_rng_state()) if has_device else b""
        return RandomState(_bytes_of(torch.get_rng_state()), device)

    def set(self) -> None:
        torch.set_rng_state(_tensor_of(self.host))
        if self.device:
            torch.cuda.set_rng_state(_tensor_of(self.device))


class Untouched:
    """What runs may change, as it is now: the random state, and the gradients and buffers of a model. And what they
    must not: its parameters, and the inputs."""

    def __init__(self, model: torch.nn.Module | None, inputs: Sequence[object]) -> None:
        """Raises UsageError for an input that requires a gradient, which would add up over the runs."""
        tensors = {f"input {n}": given for n, given in enumerate(inputs) if isinstance(given, torch.Tensor)}
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                raise UsageError(
                    f"The {name} of job.replay requires a gradient.",
                    hint="pass data as inputs, and parameters by model=...",
                )
        self.random = RandomState.now()
        self._model = model
        parameters = {} if model is None else dict(model.named_parameters())
        self._gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
        fixed = {**{f"parameter {name}": parameter for name, parameter in parameters.items()}, **tensors}
        self._fixed = [(name, tensor, tensor._version) for name, tensor in fixed.items()]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in (() if model is None else model.modules())
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def run(self, fn: Callable[..., object], inputs: Sequence[object], random: RandomState) -> Digests:
        """Run from `random`, without gradients, and with the buffers as they were. Raises UsageError if there is
        nothing to compare, and what `fn` raises."""
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._put_back_buffers()
        random.set()
        with torch.enable_grad():
            result = fn(*inputs)
        found = _digests(result, self._model)
        if not found:
            raise UsageError(
                "The function given to job.replay returned no tensor, and no model was given.",
                hint="return the loss, or pass model=... to compare its gradients",
            )
        return found

    def put_back(self) -> None:
        """Put everything back that a run may change."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._put_back_buffers()
        self.random.set()

    def check(self) -> None:
        """Raise UsageError if a run changed a parameter or an input."""
        changed = next((name for name, tensor, version in self._fixed if tensor._version != version), None)
        if changed is not None:
            raise UsageError(
                f"The function given to job.replay changed the {changed}.",
                hint="let it run forward and backward only, and copy an input before it changes it",
            )

    def _put_back_buffers(self) -> None:
        with torch.no_grad():
            for module, name, buffer, saved in self._buffers:
                buffer.copy_(saved)
                setattr(module, name, buffer)  # a forward pass may have put another tensor in its place


def differing(one: Digests, other: Digests) -> tuple[str, ...]:
    """The names of what two runs computed differently."""
    return tuple(name for name in {**one, **other} if one.get(name) != other.get(name))


def together(digests: Digests) -> str:
    """One digest for all that a run computed."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(digests.items())))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The tensor's values. Of a sharded one, this rank's."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dense = local.detach() if local.layout is torch.strided else local.detach().to_dense()
    return _bytes_of(dense.resolve_conj().resolve_neg().contiguous().reshape(-1))


def _digests(result: object, model: torch.nn.Module | None) -> Digests:
    flat = state_tree.flatten({"result": result})
    tensors = dict(flat.tensors)
    if model is not None:
        gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
        tensors |= {f"gradient of {name}": gradient for name, gradient in gradients if gradient is not None}
        tensors |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    found = {name: xxhash.xxh3_128_hexdigest(bytes_of(tensor)) for name, tensor in tensors.items()}
    # Numbers that are no tensors, and the shape of the whole.
    return {**found, "structure of the result": xxhash.xxh3_128_hexdigest(flat.tree.encode())} if found else {}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_in_place(tensor.cpu()))


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
