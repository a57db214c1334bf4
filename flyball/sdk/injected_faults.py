"""Faults that a rank of an injectable job commits on request of `flyball inject`: see contracts/on_host/injected.py.

Imported only by the ranks of jobs that were started with `--injectable`. It costs them one system call per step.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from flyball.contracts.on_host.injected import (
    MAX_ORDER_BYTES,
    ORDER_SUFFIX,
    TAKEN_SUFFIX,
    FaultOrder,
    ScriptFault,
)
from flyball.contracts.wire import MALFORMED, decoder_of

LOOK_INTERVAL_S = 1.0  # of a rank that hangs: it is to look idle
HOARD_BYTES = 64 << 20  # of memory taken at once, until there is no more
NEVER_SENT = 7_777  # tag of a message that no rank sends
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class InjectedFaultError(RuntimeError):
    """The exception that was asked for."""


class InjectedFaults:
    """Looks for an order after every step, and commits the fault."""

    def __init__(self, base: str, *, sleep: Callable[[float], object] = time.sleep) -> None:
        """`base`: FLYBALL_INJECT. `sleep` holds training up for some seconds."""
        self._sleep = sleep
        self._order_path = Path(base + ORDER_SUFFIX)
        self._taken_path = Path(base + TAKEN_SUFFIX)
        self._order: FaultOrder | None = None  # taken, and not yet committed: it needs the state
        self._slow_s = 0.0

    def after_step(self, step: int) -> None:
        """Commit what is due after this step. May never return."""
        if self._slow_s:
            self._slow_s = self._slow_s if self._taken_path.exists() else 0.0
            self._sleep(self._slow_s)
        order = self._take(step)
        if order is None:
            return
        match order.fault:
            case ScriptFault.HANG_COLLECTIVE:
                wait_for_a_message_that_nobody_sends()
            case ScriptFault.HANG_DATA:
                self._wait_for_data()
            case ScriptFault.SLOW_STEPS:
                self._slow_s = order.seconds
            case ScriptFault.OUT_OF_MEMORY:
                exhaust_memory()
            case ScriptFault.EXCEPTION:
                raise InjectedFaultError(f"flyball inject asked for this exception after step {step}.")
            case ScriptFault.EXIT:
                sys.stderr.write(f"flyball inject: exit with code {order.code}\n")
                sys.stderr.flush()
                os._exit(order.code)
            case ScriptFault.NAN | ScriptFault.FLIP_BIT:
                self._order = order

    def before_save(self, state: Mapping[str, object]) -> None:
        """Damage the state, if that was asked for: as an optimizer step does that computes wrong values."""
        order, self._order = self._order, None
        if order is None:
            return
        parameter = _small_parameter(state)
        if parameter is None:
            sys.stderr.write("flyball inject: the saved state has no parameter to damage\n")
            return
        with torch.no_grad():
            if order.fault is ScriptFault.NAN:
                parameter.view(-1)[0] = float("nan")
            else:
                flip_bit(parameter, order.bit)

    def _take(self, step: int) -> FaultOrder | None:
        try:
            data = self._order_path.read_bytes()[: MAX_ORDER_BYTES + 1]
        except OSError:
            return None  # the usual case: there is none
        try:
            order = decoder_of(FaultOrder).decode(data)
        except MALFORMED as error:
            sys.stderr.write(f"flyball inject: {self._order_path} is not valid: {error}\n")
            self._order_path.unlink(missing_ok=True)
            return None
        if step < order.step:
            return None
        try:
            self._order_path.rename(self._taken_path)
            os.utime(self._taken_path)
        except OSError:
            return None  # it was taken back
        return order

    def _wait_for_data(self) -> None:
        """As in a data loader whose workers or storage hang. A script that marks its phases says `data` meanwhile, and
        gets more patience; most scripts do not."""
        while self._taken_path.exists():
            self._sleep(LOOK_INTERVAL_S)


def wait_for_a_message_that_nobody_sends() -> None:
    """Hang in the communication library, as a rank does whose peer or network is gone; alone, do nothing."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        sys.stderr.write("flyball inject: a single rank has no collective to hang in\n")
        return
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    source = (dist.get_rank() + 1) % dist.get_world_size()
    dist.recv(torch.zeros(1, device=device), src=source, tag=NEVER_SENT)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the call above only queues it


def exhaust_memory() -> None:
    """Allocate until the allocator raises: on the GPU, or within a limit for this process that spares the host."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not on_gpu:
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 4 * HOARD_BYTES, hard))
    hoard = []
    while True:
        hoard.append(torch.empty(HOARD_BYTES, dtype=torch.uint8, device="cuda" if on_gpu else "cpu"))


def flip_bit(parameter: torch.Tensor, bit: int) -> None:
    """Flip one bit of the parameter's first number."""
    width = parameter.element_size()
    bits = parameter.detach().view(-1)[:1].view(_INTEGERS[width])
    bit %= 8 * width
    if bit == 8 * width - 1 and width > 1:  # the sign: no positive number of that type has this bit alone
        bits.bitwise_xor_(torch.tensor(torch.iinfo(bits.dtype).min, dtype=bits.dtype, device=bits.device))
    else:
        bits.bitwise_xor_(1 << bit)


def _small_parameter(state: Mapping[str, object]) -> torch.Tensor | None:
    """A parameter that every forward pass uses: a vector (a bias, a scale) rather than a table."""
    found = [p for p in _parameters(state) if p.is_floating_point() and p.numel() and p.is_contiguous()]
    return next((p for p in reversed(found) if p.dim() == 1), found[0] if found else None)


def _parameters(state: Mapping[str, object]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, torch.nn.Module):
            yield from value.parameters()
        elif isinstance(value, torch.nn.Parameter):
            yield value
