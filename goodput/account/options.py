"""Facts that the log lacks and the caller may supply. Pure."""

from __future__ import annotations

import math

import msgspec

from flyball.contracts.errors import UsageError


class AccountOptions(msgspec.Struct, frozen=True):
    """None: unknown; fields that depend on it are None in the report, or use the log. Raises UsageError."""

    gpu_hour_price: float | None = None  # price of one GPU for one hour, in any currency
    window_s: float = 3600.0  # of the rolling measures
    from_at: float | None = None  # wall clock: report on the job's time from here
    to_at: float | None = None  # to here
    model_flops_per_step: float | None = None  # of the model, in one step of the world
    peak_flops_per_gpu: float | None = None  # per second
    gpus: int | None = None  # None: one per rank in the log
    reference_step_s: float | None = None  # duration of a step on an ideal machine

    def __post_init__(self) -> None:
        for name in ("gpu_hour_price", "from_at", "to_at"):
            self._check(name, least=0.0)
        for name in ("window_s", "model_flops_per_step", "peak_flops_per_gpu", "gpus", "reference_step_s"):
            self._check(name, least=math.nextafter(0.0, 1.0))
        if self.from_at is not None and self.to_at is not None and self.from_at >= self.to_at:
            raise UsageError("The report's end is not after its start.", hint="give a `to` that is after `from`")

    def _check(self, name: str, *, least: float) -> None:
        value = getattr(self, name)
        if value is not None and not (math.isfinite(value) and value >= least):
            wanted = "a number above 0" if least > 0 else "0 or a number above"
            raise UsageError(f"{name} cannot be {value}.", hint=f"give {wanted}")
