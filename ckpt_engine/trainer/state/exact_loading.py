"""Make the tensors of a file out of the stored ones: strides, views, Parameters. See `exact_tensors`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine.trainer.state import tree_building
from ckpt_engine.trainer.state.exact_tensors import dense_stride, source_of
from ckpt_engine.trainer.state.tree_building import from_tensor


def build_exactly(entries: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The entries of a file's state, of these stored tensors. Raises CorruptShard."""
    exact = ExactTensors(tensors)
    for step in (exact.lay_out, exact.value):
        built = {key: tree_building.build(node, step) for key, node in entries.items()}
    return built


class ExactTensors:
    """Makes the values of leaves out of stored tensors. What was one object is one again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors` are contiguous, in memory that nobody else has."""
        self._tensors = dict(tensors)
        self._made: dict[str, Any] = {}

    def lay_out(self, tag: str, content: Any) -> None:  # noqa: ANN401 - JSON
        """Give the stored tensor of this leaf its strides. Call it for all leaves, then `value`."""
        while tag in ("$parameter", "$requires_grad"):
            ((tag, content),) = (content[0] if tag == "$parameter" else content).items()
        if tag == "$strided":
            _, name, stride = content
            plain = self._tensors[name]
            if list(plain.stride()) != stride:
                strided = torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device=plain.device)
                if dense_stride(strided) is None:
                    raise ValueError(f"{stride} is not the stride of a dense tensor of {tuple(plain.shape)}")
                self._tensors[name] = strided.copy_(plain)

    def value(self, tag: str, content: Any) -> Any:  # noqa: ANN401 - JSON in, a tensor or an array out
        key = f"{tag} {content}"
        if key not in self._made:
            if tag in ("$parameter", "$requires_grad"):
                node, grad = content if tag == "$parameter" else (content, True)
                ((inner, of_inner),) = node.items()
                tensor = self.value(inner, of_inner)
                if tag == "$parameter":
                    self._made[key] = torch.nn.Parameter(tensor, requires_grad=bool(grad))
                else:
                    self._made[key] = tensor.detach().requires_grad_()
            elif tag == "$view":
                self._made[key] = self._view(content[0], content[1], content[2:5], is_complex=content[5])
            else:
                inner, name = source_of(tag, content)
                self._made[key] = from_tensor(inner, self._tensors[name])
        return self._made[key]

    def _view(self, name: str, dtype: str, place: list[Any], *, is_complex: bool) -> torch.Tensor:
        shape, stride, offset = place
        base = self._tensors[name]
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype) or offset < 0:
            raise ValueError(f"{dtype!r} at {offset} is no view")
        view = torch.empty(0, dtype=kind, device=base.device)
        # It must stay inside: torch makes a storage larger that is too small for a view.
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if min(stride, default=0) < 0 or min(shape, default=1) < 1 or (last + 1) * kind.itemsize > base.nbytes:
            raise ValueError(f"a view of {shape}, {stride} at {offset} is not inside {name!r}")
        view = view.set_(base.untyped_storage(), offset, shape, stride)
        return torch.view_as_complex(view) if is_complex else view
