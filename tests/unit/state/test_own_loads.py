"""Modules whose own code loads their state: it decides about names and shapes. What torch would do silently wrong is
refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from support.stores.shards import make_manifest
from torch import nn

from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.restore.load_shard import restore_into
from flyball.contracts.errors import StateMismatch


def restore(saved: dict[str, Any], target: dict[str, Any]) -> None:
    capture = Capturer().take(saved)
    payload = memoryview(bytearray(capture.payload_bytes))
    capture.copy_into(0, payload)
    restore_into(target, MemorySource(payload), make_manifest(payload, generation=0))


class Fp8Like(nn.Linear):
    """Has extra state that grows with the first forward."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.meta: dict[str, float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meta = {"amax": x.abs().max().item()}
        return super().forward(x)

    def get_extra_state(self) -> torch.Tensor:
        content = json.dumps(self.meta).encode() if self.meta else b""
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.meta = json.loads(state.numpy().tobytes()) if len(state) else None


class GrowingCodes(nn.Module):
    """Takes over the size of what is loaded, unless it has begun: code that looks at what it had."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))
        self.register_buffer("codes", torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.fill_(value=True)
        self.codes = x.detach().clone()
        return x

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # noqa: ANN401
        if not self.begun:
            self.codes = torch.zeros_like(state[prefix + "codes"])
        super()._load_from_state_dict(state, prefix, *rest)


def renaming() -> nn.Module:
    """Reads the names of an older layout, by a hook."""
    made = nn.Sequential(nn.Linear(3, 3))

    def rename(state: dict[str, Any], prefix: str, *_: object) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}old.{name}" in state:
                state[f"{prefix}0.{name}"] = state.pop(f"{prefix}old.{name}")

    made._register_load_state_dict_pre_hook(rename)
    return made


def qat() -> nn.Module:
    made = nn.Sequential(quantization.QuantStub(), nn.Linear(3, 4), nn.BatchNorm1d(4), quantization.DeQuantStub())
    made.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return quantization.prepare_qat(made.train())  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "extra state": lambda: nn.Sequential(Fp8Like(), nn.Linear(3, 3)),
    "own code": lambda: nn.Sequential(nn.Linear(3, 3), GrowingCodes()),
    "quantization aware": qat,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_trained_state_is_restored_into_a_fresh_module_as_torch_does(name: str) -> None:
    torch.manual_seed(0)
    trained = MODELS[name]()
    trained(torch.randn(5, 3))
    fresh, by_torch = MODELS[name](), MODELS[name]()
    by_torch.load_state_dict(trained.state_dict())
    restore({"m": trained}, {"m": fresh})
    expected, found = by_torch.state_dict(), fresh.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_older_layout_is_read_by_the_modules_own_hook() -> None:
    old = nn.Sequential()
    old.add_module("old", nn.Linear(3, 3))
    target = renaming()
    restore({"m": old}, {"m": target})
    assert torch.equal(target[0].weight, old.old.weight)  # type: ignore[index,union-attr]


def test_other_modules_beside_them_are_compared_before_anything_is_written() -> None:
    saved, target = nn.Sequential(Fp8Like(), nn.Linear(3, 3)), nn.Sequential(Fp8Like(), nn.Linear(3, 4))
    before = target[0].weight.detach().clone()
    for into in (target, nn.Sequential(Fp8Like()), nn.Sequential(Fp8Like(), nn.Linear(3, 3), nn.Linear(3, 3))):
        with pytest.raises(StateMismatch, match=r"'m\.(1|2)"):
            restore({"m": saved}, {"m": into})
    assert torch.equal(target[0].weight, before)


def test_what_the_modules_own_code_refuses_is_a_mismatch() -> None:
    with pytest.raises(StateMismatch, match=r"does not take the saved state: .*size mismatch"):
        restore({"m": nn.BatchNorm1d(3)}, {"m": nn.BatchNorm1d(4)})


def test_a_state_on_the_meta_device_is_refused_whatever_holds_it() -> None:
    """Torch would copy nothing, with a warning at most."""
    real = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(real.parameters())
    real(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.device("meta"):
        meta = nn.Linear(3, 3)
    targets: dict[str, tuple[object, object]] = {
        "module": (real, meta),
        "state dict": (real.state_dict(), meta.state_dict()),
        "optimizer": (optimizer, torch.optim.AdamW(meta.parameters())),
        "own code": (nn.Sequential(Fp8Like()), nn.Sequential(Fp8Like()).to("meta")),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for saved, target in targets.values():
            with pytest.raises(StateMismatch, match=r"on the meta device.*to_empty"):
                restore({"m": saved}, {"m": target})
