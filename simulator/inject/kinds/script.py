"""Faults that a rank commits itself, because it was asked to: in the script's own process, between two steps."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import ClassVar

import msgspec

from flyball.contracts.errors import NotFound, Unreachable
from flyball.contracts.on_host.injected import (
    INJECT_FOLDER,
    ORDER_SUFFIX,
    TAKEN_SUFFIX,
    FaultOrder,
    ScriptFault,
    injected_base,
)
from flyball.contracts.wire import convert
from flyball.state_folder import clear_errors, make_folder, write_private
from simulator.inject.faults import running_worker
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.kinds.processes import of_process, send_to

TAKE_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 0.02
LASTS_S = 700.0  # longer than a blocked rank has by default until it counts as hung
AT_STEP = Option("step", -1, "after this step; -1: after the next one")


class _InScript(RealFault):
    target = FaultTarget.RANK
    fault: ClassVar[ScriptFault]
    options: ClassVar[tuple[Option, ...]] = (AT_STEP,)

    def plan(self, site: FaultSite) -> Plan:
        worker, process = running_worker(site.host, site.job, site.rank, site.host_id)
        base = injected_base(str(site.host.root / INJECT_FOLDER), site.job, site.rank)
        if Path(base + ORDER_SUFFIX).exists():
            raise NotFound(
                f"Rank {site.rank} has not yet committed the fault that it was asked for before.",
                hint="wait for its next step, or take the fault back with `flyball inject undo`",
            )
        order = FaultOrder(site.injection_id, self.fault, **(site.values or {}))  # type: ignore[arg-type]
        convert(msgspec.to_builtins(order), FaultOrder)  # the limits of its numbers
        return of_process(process) | {
            "base": base,
            "order": msgspec.to_builtins(order),
            "rank": site.rank,
            "generation": worker.generation,
        }

    def inject(self, plan: Plan) -> float:
        order_path, taken_path = Path(plan["base"] + ORDER_SUFFIX), Path(plan["base"] + TAKEN_SUFFIX)
        with clear_errors(order_path):
            make_folder(order_path.parent)
            taken_path.unlink(missing_ok=True)
            write_private(order_path, msgspec.json.encode(plan["order"]), durable=False)
        until_s = time.monotonic() + TAKE_TIMEOUT_S
        while time.monotonic() < until_s:
            if taken_path.exists():
                return taken_path.stat().st_mtime
            time.sleep(LOOK_INTERVAL_S)
        order_path.unlink(missing_ok=True)
        raise Unreachable(
            f"Rank {plan['rank']} did not take the fault within {TAKE_TIMEOUT_S:.0f} s: nothing was done.",
            hint="the script has to call flyball.attach() and job.step(); see that it makes steps (flyball status)",
        )

    def undo(self, plan: Plan) -> None:
        for suffix in (ORDER_SUFFIX, TAKEN_SUFFIX):
            Path(plan["base"] + suffix).unlink(missing_ok=True)


class HangCollective(_InScript):
    name = "hang-collective"
    about = "a rank waits in the communication library for a message that nobody sends; the others wait for the rank"
    fault = ScriptFault.HANG_COLLECTIVE
    lasts_s = LASTS_S
    causes = ("rank_stalled",)

    def undo(self, plan: Plan) -> None:
        """A rank cannot leave the call: if it is still in it, it is killed, and the supervisor starts it again."""
        was_taken = Path(plan["base"] + TAKEN_SUFFIX).exists()
        super().undo(plan)
        if was_taken:
            send_to(plan, signal.SIGKILL)


class HangData(_InScript):
    name = "hang-data"
    about = "a rank waits for its next batch until the fault is undone"
    fault = ScriptFault.HANG_DATA
    lasts_s = LASTS_S
    causes = ("rank_stalled",)


class SlowSteps(_InScript):
    name = "slow-steps"
    about = "a rank computes longer for every step"
    fault = ScriptFault.SLOW_STEPS
    options = (AT_STEP, Option("seconds", 0.2, "more per step"))
    lasts_s = 60.0


class OutOfMemory(_InScript):
    name = "out-of-memory"
    about = "a rank allocates until the allocator raises: of the GPU, else within a limit for its process alone"
    fault = ScriptFault.OUT_OF_MEMORY
    causes = ("worker_exception",)


class Exception_(_InScript):
    name = "exception"
    about = "a rank raises an exception"
    fault = ScriptFault.EXCEPTION
    causes = ("worker_exception",)


class Exit(_InScript):
    name = "exit"
    about = "a rank exits at once, with a code"
    fault = ScriptFault.EXIT
    options = (AT_STEP, Option("code", 1, "exit code, 0 to 255"))
    causes = ("worker_exception",)


class Nan(_InScript):
    name = "nan"
    about = "a number of a parameter becomes NaN, so the loss does"
    fault = ScriptFault.NAN
    causes = ("loss_diverged",)


class FlipBit(_InScript):
    name = "flip-bit"
    about = "a bit of a parameter of one rank flips: 30, in the exponent of a float32, is seen in the loss"
    fault = ScriptFault.FLIP_BIT
    options = (AT_STEP, Option("bit", 30, "number of the bit, from the lowest"))
    causes = ("loss_diverged", "replicas_differ")
