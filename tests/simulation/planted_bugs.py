"""Bugs that a swarm has to find: each takes one rule out of the production code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from ckpt_engine.rules.slot_rules import SlotState, SlotView
from flyball.contracts.checkpoints import Tier
from flyball.contracts.reports.signals import HostSilent, PreemptionNotice, Signal
from host_daemon.store.command_journal import CommandAdmission
from services.actuator.rules import restoring
from services.controller import loop
from services.controller.round import blast_radius
from services.controller.round.view import Outcome
from services.rules import recovery_point
from services.sensor.detector.fault_detector import FaultDetector
from simulator.ports import decision_store
from simulator.world import commands, world

Patch = pytest.MonkeyPatch


class PlantedBug(NamedTuple):
    """A bug, and a seed that finds it."""

    name: str
    plant: Callable[[Patch], None]
    seed: int
    invariant: str  # that breaks, among others perhaps


def _admits_stale(patch: Patch) -> None:
    def admit(fence: object, highest: object, *, is_known: bool, answer: object) -> CommandAdmission:
        admission = real(fence, highest, is_known=is_known, answer=answer)  # type: ignore[arg-type]
        return CommandAdmission.NEW if admission is CommandAdmission.STALE else admission

    real = commands.admit
    patch.setattr(commands, "admit", admit)


def _obeys_twice(patch: Patch) -> None:
    patch.setattr(commands, "admit", lambda *_, **__: CommandAdmission.NEW)


def _leads_without_a_lease(patch: Patch) -> None:
    patch.setattr(decision_store, "epoch_for", lambda holder, held, now, **_: held.epoch + (held.holder != holder))


def _knows_no_signal_again(patch: Patch) -> None:
    def unseen(_: object, signals: Sequence[Signal]) -> list[Signal]:
        return list(signals)

    patch.setattr(decision_store.MemoryDecisionStore, "unseen", unseen)


def _supersedes_nothing(patch: Patch) -> None:
    def decide(*given: Any) -> Outcome:  # noqa: ANN401 - as the policy's
        return msgspec.structs.replace(real(*given), superseded_actions=())

    real = loop.decide
    patch.setattr(loop, "decide", decide)


def _forgets_the_branch(patch: Patch) -> None:
    def branch(lineage: Any, **given: Any) -> Any:  # noqa: ANN401 - as the contracts'
        return tuple(
            msgspec.structs.replace(entry, upto_step=10_000) if entry.upto_step is not None else entry
            for entry in real(lineage, **given)
        )

    real = restoring.branch
    patch.setattr(restoring, "branch", branch)


def _takes_any_copy_for_all(patch: Patch) -> None:
    def complete_points(copies: Any, lineage: Any, world_size: int) -> set[tuple[int, int]]:  # noqa: ANN401
        return {(copy.step, copy.generation) for copy in copies if real_is_alive(copy.generation, copy.step, lineage)}

    from flyball.contracts.checkpoints import is_alive as real_is_alive

    patch.setattr(recovery_point, "complete_points", complete_points)


def _cordons_without_limit(patch: Patch) -> None:
    patch.setattr(blast_radius, "too_many", lambda *_: "")


def _overwrites_the_oldest(patch: Patch) -> None:
    """Even if it is the only step that has replicas."""
    patch.setattr(world, "choose_slot", lambda slots, *_: min(slots, key=lambda slot: slot.step))


def _overwrites_nothing(patch: Patch) -> None:
    def choose_slot(slots: Sequence[SlotView], *_: object) -> SlotView | None:
        return next((slot for slot in slots if slot.state is SlotState.EMPTY), None)

    patch.setattr(world, "choose_slot", choose_slot)


def _leaves_the_store_out(patch: Patch) -> None:
    """Whoever plans a restore."""

    def plan_restore(copies: Any, *given: Any) -> Any:  # noqa: ANN401 - as the core's
        return real([copy for copy in copies if copy.tier is not Tier.PERSISTENT], *given)

    real = restoring.plan_restore
    patch.setattr(restoring, "plan_restore", plan_restore)


def _never_tells_of_silence(patch: Patch) -> None:
    def tick(self: FaultDetector, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - as the detector's
        return [body for body in real(self, *given, **named) if not isinstance(body, HostSilent)]

    real = FaultDetector.tick
    patch.setattr(FaultDetector, "tick", tick)


def _fails_on_a_notice(patch: Patch) -> None:
    def decide(view: Any, signals: Sequence[Signal], *given: Any) -> Outcome:  # noqa: ANN401 - as the policy's
        for signal in signals:
            if isinstance(signal.body, PreemptionNotice):
                raise KeyError(signal.source)
        return real(view, signals, *given)

    real = loop.decide
    patch.setattr(loop, "decide", decide)


BUGS = (
    PlantedBug("leads without a lease", _leads_without_a_lease, 0, "training_not_back"),
    PlantedBug("knows no signal again", _knows_no_signal_again, 0, "crash"),
    PlantedBug("supersedes nothing", _supersedes_nothing, 0, "two_open_actions"),
    PlantedBug("takes any copy for all", _takes_any_copy_for_all, 0, "shard_not_there"),
    PlantedBug("fails on a notice", _fails_on_a_notice, 0, "crash"),
    PlantedBug("obeys commands twice", _obeys_twice, 3, "command_obeyed_twice"),
    PlantedBug("forgets the branch", _forgets_the_branch, 1, "lineage_broken"),
    PlantedBug("cordons without limit", _cordons_without_limit, 1, "blast_radius"),
    PlantedBug("admits stale commands", _admits_stale, 13, "stale_command_obeyed"),
    PlantedBug("never tells of silence", _never_tells_of_silence, 3, "training_not_back"),
    PlantedBug("leaves the store out", _leaves_the_store_out, 103, "training_not_back"),
    PlantedBug("overwrites the oldest", _overwrites_the_oldest, 46, "recovery_point_dropped"),
    PlantedBug("overwrites nothing", _overwrites_nothing, 7, "training_not_saved"),
)
