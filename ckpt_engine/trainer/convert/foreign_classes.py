"""Classes that other engines' files name beside tensors and plain values. Nothing of those engines is imported, and
nothing of a file is run: each name stands for a class here that keeps what the file gives it, and plain values follow
from that.

    nvidia_resiliency_ext     the state dict of its local checkpoints
    argparse, megatron.core   Megatron-LM's arguments, and its enums in them
    dlrover                   the settings of a save, which some of its savers leave beside the state
    numpy                     arrays, as in the states of random generators
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt_engine.trainer.state.state_tree import with_metadata
from flyball.contracts.errors import UnsupportedState


class Kept:
    """Keeps the attributes that a file gives it."""


class NvidiaState(Kept):
    """BasicTensorAwareStateDict: `state_dict`, and whether its tensors were taken out."""


class NvidiaPlaceholder(Kept):
    """TensorPlaceholder: where a tensor was taken out."""


class Arguments(Kept):
    """argparse.Namespace."""


class DlroverSettings(Kept):
    """CheckpointConfig."""


def _enum(name: str) -> Callable[[object], str]:
    """Of a member of an Enum, its class and value."""

    def member(value: object) -> str:
        return f"{name}({value!r})"

    return member


def _array(kind: type, shape: tuple[int, ...], dtype: Any) -> Any:  # noqa: ANN401 - an empty array
    """numpy's _reconstruct, for arrays alone."""
    if kind is not np.ndarray:
        raise UnsupportedState(f"A {kind.__name__} is no array.", hint="save it as a tensor")
    return np.ndarray(shape, np.dtype(dtype))


_MEGATRON_ENUMS = {
    "megatron.core.transformer.enums": (
        *("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope"),
    ),
    "megatron.core.enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
}
_NUMBERS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_NVIDIA = "nvidia_resiliency_ext.checkpointing.local.basic_state_dict"

STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (NvidiaState, f"{_NVIDIA}.BasicTensorAwareStateDict"),
    (NvidiaPlaceholder, f"{_NVIDIA}.TensorPlaceholder"),
    (Arguments, "argparse.Namespace"),
    (DlroverSettings, "dlrover.python.elastic_agent.torch.ckpt_saver.CheckpointConfig"),
    *((_enum(name), f"{module}.{name}") for module, names in _MEGATRON_ENUMS.items() for name in names),
    (_array, "numpy._core.multiarray._reconstruct"),  # numpy 2
    (_array, "numpy.core.multiarray._reconstruct"),
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    *((type(np.dtype(kind)), f"numpy.dtypes.{type(np.dtype(kind)).__name__}") for kind in _NUMBERS),
]


def as_plain(found: Any) -> Any:  # noqa: ANN401 - any state
    """The plain values that a file's objects stand for, in place of them; containers as they are. Raises
    UnsupportedState."""
    if isinstance(found, NvidiaState):
        return as_plain(_attribute(found, "state_dict"))
    if isinstance(found, Arguments):
        return as_plain(vars(found))
    if isinstance(found, NvidiaPlaceholder):
        raise UnsupportedState(
            "The state has placeholders in place of tensors.", hint="import a file that its checkpoint manager saved"
        )
    if isinstance(found, Kept):
        raise UnsupportedState(f"The state has a {type(found).__name__} in it.", hint="save tensors and plain values")
    if type(found) in (dict, OrderedDict):
        kept = {key: item for key, item in found.items() if not isinstance(item, DlroverSettings)}
        return with_metadata(type(found)((key, as_plain(item)) for key, item in kept.items()), found)
    if type(found) in (list, tuple):
        return type(found)(map(as_plain, found))
    return found


def _attribute(found: Kept, name: str) -> Any:  # noqa: ANN401 - any state
    if name not in vars(found):
        raise UnsupportedState(f"The file has a {type(found).__name__} without its {name}.", hint="it may be damaged")
    return vars(found)[name]
