"""What a file in place of torch.save's keeps of a tensor beside its values: strides, requires_grad, whether it is a
Parameter, and which tensors share memory.

A job's state does without: its tensors are filled where they are. In the tree of a file, beside the tags of
`state_tree`:

    {"$strided": [tag, name, stride]}      stored tensor `name`, laid out densely in memory with another stride
    {"$view": [name, dtype, shape, stride, offset, is_complex]}     a view of the memory of stored tensor `name`
    {"$parameter": [node, requires_grad]}  {"$requires_grad": node}

Tensors whose memory overlaps are views of one of them if it has all of that memory, else of an entry of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

TAGS: Final = frozenset(("$strided", "$view", "$parameter", "$requires_grad"))
_COMPLEX = "$complex_tensor"


def dense_stride(tensor: torch.Tensor) -> list[int] | None:
    """The stride of a tensor that lies in one piece and in another order than a contiguous one; else None."""
    if tensor.is_contiguous() or not tensor.numel():
        return None
    expected = 1
    for stride, size in sorted((tensor.stride(d), tensor.size(d)) for d in range(tensor.dim()) if tensor.size(d) > 1):
        if stride != expected:
            return None
        expected *= size
    return list(tensor.stride())


def described(node: dict[str, Any], stored: torch.Tensor, tensor: torch.Tensor) -> tuple[dict[str, Any], Any]:
    """The leaf of `tensor`, whose bytes `node` describes as `stored`; and the node around it."""
    stride = dense_stride(stored)
    if stride is not None:
        ((tag, name),) = node.items()
        node = {"$strided": [tag, name, stride]}
    if type(tensor) is torch.nn.Parameter:
        return node, {"$parameter": [node, tensor.requires_grad]}
    return node, {"$requires_grad": node} if tensor.requires_grad else node


def source_of(tag: str, content: Any) -> tuple[str, Any]:  # noqa: ANN401 - JSON
    """The tag and name of the stored tensor that a leaf is made of."""
    while tag in ("$parameter", "$requires_grad"):
        ((tag, content),) = (content[0] if tag == "$parameter" else content).items()
    if tag == "$strided":
        return content[0], content[1]
    return ("$tensor", content[0]) if tag == "$view" else (tag, content)


# --- shared memory ---


def spans(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, int, int, str]]:
    """(device, first address, end, name) of those with memory that others may share, in order."""
    found = []
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_neg():
            begin = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            found.append((str(tensor.device), begin, begin + (last + 1) * tensor.itemsize, name))
    return sorted(found)


def overlap(found: list[tuple[str, int, int, str]]) -> bool:
    """Whether any two of these `spans` overlap."""
    return any(one[0] == two[0] and two[1] < one[2] for one, two in itertools.pairwise(found))


def share_memory(tensors: dict[str, torch.Tensor], leaves: list[dict[str, Any]]) -> None:
    """Store the memory of tensors that overlap once: take those that become views out of `tensors`, and change their
    leaves."""
    found = spans(tensors)
    if not overlap(found):
        return
    sources = [source_of(tag, content) for leaf in leaves for tag, content in leaf.items()]
    complex_names = {name for tag, name in sources if tag == _COMPLEX}
    views: dict[str, list[Any]] = {}
    group: list[tuple[str, int, int, str]] = []
    for span in [*found, ("", 0, 0, "")]:
        if group and span[0] == group[0][0] and span[1] < max(end for _, _, end, _ in group):
            group.append(span)
            continue
        if len(group) > 1:
            views.update(_views_of(tensors, group, complex_names))
        group = [span]
    for leaf in leaves:
        ((tag, content),) = leaf.items()
        tag, name = source_of(tag, content)
        if name in views:
            leaf.clear()
            leaf["$view"] = [*views[name], tag == _COMPLEX]
    for name in views:
        del tensors[name]


def _views_of(
    tensors: dict[str, torch.Tensor], group: list[tuple[str, int, int, str]], complex_names: Collection[str]
) -> dict[str, list[Any]]:
    """The views, by the names that they had; none if one would not be aligned to its elements. Adds an entry for the
    memory itself if no tensor has all of it."""
    begin, end = group[0][1], max(end for _, _, end, _ in group)
    members = [(name, tensors[name], first - begin) for _, first, _, name in group]
    parts = {name: 2 if name in complex_names else 1 for name, _, _ in members}
    if any(offset % (parts[name] * tensor.itemsize) for name, tensor, offset in members):
        return {}
    base = next((name for name, tensor, _ in members if _has_all(tensor, begin, end)), None)
    if base is None:
        whole = _memory(tensors[group[0][3]], begin, end)
        if whole is None:
            return {}
        base = f"{group[0][3]}.memory"
        while base in tensors:
            base += "'"
        tensors[base] = whole
    return {
        name: [base, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()), place]
        for name, tensor, offset in members
        if name != base
        for place in (offset // tensor.itemsize,)
    }


def _has_all(tensor: torch.Tensor, begin: int, end: int) -> bool:
    is_dense = tensor.is_contiguous() or dense_stride(tensor) is not None
    return is_dense and (tensor.data_ptr(), tensor.nbytes) == (begin, end - begin)


def _memory(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor | None:
    """This memory, if it is of one storage."""
    storage = tensor.untyped_storage()
    offset = begin - storage.data_ptr()
    if offset < 0 or offset + end - begin > storage.nbytes():
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, offset, (end - begin,), (1,))
