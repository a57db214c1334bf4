"""Runs a scenario, has goodput account for it, and checks both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec

from flyball import __version__
from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import IncidentState
from flyball.contracts.errors import UsageError
from goodput.account.timeline_bins import TimelineBin, binned
from goodput.calculator import Analysis, GoodputReport, analyse
from goodput.predict.prediction import SECONDS_PER_DAY, Range, expected_ettr, rate_interval
from goodput.read.simulations import SCHEMA
from simulator.fleet import log
from simulator.fleet.control_plane import JOB
from simulator.fleet.scenario import Distribution, Effect, FleetScenario
from simulator.fleet.world import FleetWorld
from simulator.world.events import BEGAN_AT

TIMELINE_BINS = 240  # slices of the result's timeline
_SAME_S = 1e-3  # of a year: sums of floats
_SAME_GOODPUT = 0.005
_OPEN_S = 7200.0  # an incident may be open for so long after the last fault while hosts are free


class CauseCount(msgspec.Struct, frozen=True):
    """How often a cause struck, and how often it was expected to."""

    name: str
    effect: str
    faults: int
    interruptions: int  # faults that stopped ranks which ran
    expected: float | None  # None for a trace
    likely: Range | None  # the number of faults, with 99.9 % confidence


class Result(msgspec.Struct, frozen=True):
    """The result of one run. Times are seconds, shares are of the elapsed time."""

    schema: str
    version: str
    scenario: str
    seed: int
    digest: str  # of all decisions and moves: the same seed and version give the same
    days: float
    nodes: int
    gpus: int
    outcome: str  # "running", or "failed" if the policy gave the job up
    message: str
    failed_at_s: float | None
    useful: float
    recomputed: float
    saving: float
    down: float
    interruptions: int
    lost_gpu_hours: float
    causes: tuple[CauseCount, ...]
    closed_form_ettr: float | None  # Meta's, with the restart time that was simulated
    goodput: GoodputReport  # the production account of the run's event log
    timeline: tuple[TimelineBin, ...]  # of that account
    violations: tuple[str, ...]
    decisions: int
    rounds: int
    postponed_faults: int
    spares_left: int


class Simulated(msgspec.Struct, frozen=True):
    """A result, and the account behind it."""

    result: Result
    analysis: Analysis


def simulate(
    scenario: FleetScenario, seed: int, name: str, passed: Callable[[float], None] = lambda _: None
) -> Simulated:
    """Run a scenario. `passed` is told the simulated seconds so far, very often."""
    if seed < 0:
        raise UsageError(f"The seed is {seed}.", hint="give a whole number from 0 on")
    world = FleetWorld(scenario, seed)
    world.run(passed)
    gpus = scenario.job.nodes * scenario.job.gpus_per_node
    events = [*log.with_true_size(world.control.events, gpus, world.ranks.every_steps), *world.ranks.log]
    analysis = analyse(events, now=BEGAN_AT + scenario.length_s, job=JOB)
    spent, length_s, line = world.training.spent, scenario.length_s, analysis.timeline
    interruptions = sum(fault.interrupted for fault in world.faults)
    has_failed = world.control.has_ended
    row = world.control.memory.jobs[JOB]
    return Simulated(
        Result(
            schema=SCHEMA,
            version=__version__,
            scenario=name,
            seed=seed,
            digest=world.control.digest,
            days=scenario.days,
            nodes=scenario.job.nodes,
            gpus=gpus,
            outcome="failed" if has_failed else "running",
            message=row.message if has_failed else "",
            failed_at_s=row.ended_at - BEGAN_AT if has_failed else None,
            useful=spent.useful_s / length_s,
            recomputed=spent.recomputed_s / length_s,
            saving=spent.saving_s / length_s,
            down=spent.down_s / length_s,
            interruptions=interruptions,
            lost_gpu_hours=(1.0 - spent.useful_s / length_s) * length_s * gpus / 3600.0,
            causes=tuple(_causes(world)),
            closed_form_ettr=_closed_form(world, interruptions),
            goodput=analysis.report,
            timeline=binned(line.intervals, line.start, line.end, TIMELINE_BINS),
            violations=tuple(_violations(world, analysis.report)),
            decisions=world.control.decisions,
            rounds=world.control.rounds,
            postponed_faults=world.postponed,
            spares_left=world.spares_left,
        ),
        analysis,
    )


def _causes(world: FleetWorld) -> Iterator[CauseCount]:
    faults = Counter(fault.cause for fault in world.faults)
    stopped = Counter(fault.cause for fault in world.faults if fault.interrupted)
    for cause in world.scenario.causes:
        is_poisson = cause.distribution is Distribution.EXPONENTIAL
        expected = world.scenario.rate_per_s(cause) * world.scenario.length_s
        yield CauseCount(
            name=cause.name,
            effect=cause.effect.value,
            faults=faults[cause.name],
            interruptions=stopped[cause.name],
            expected=None if cause.distribution is Distribution.TRACE else expected,
            likely=rate_interval(faults[cause.name], 1.0, confidence=0.999) if is_poisson else None,
        )


def _closed_form(world: FleetWorld, interruptions: int) -> float | None:
    """Meta's expected ETTR for the rate of interruptions in the scenario, with the mean time that each took here."""
    scenario, training = world.scenario, world.training
    causes = [cause for cause in scenario.causes if cause.effect is not Effect.PLANNED]
    if not interruptions or any(cause.distribution is Distribution.TRACE for cause in causes):
        return None
    per_day = sum(map(scenario.rate_per_s, causes)) * SECONDS_PER_DAY
    return expected_ettr(
        nodes=scenario.job.nodes,
        failures_per_1000_node_days=1000.0 * per_day / scenario.job.nodes,
        restart_s=training.spent.down_s / interruptions,
        interval_s=training.cycle_s,
        save_s=training.save_s,
    )


# --- checks ----------------------------------------------------------------------------------------------------------


def _violations(world: FleetWorld, report: GoodputReport) -> Iterator[str]:
    """What must never be, and is."""
    yield from world.ranks.violations
    length_s, spent = world.scenario.length_s, world.training.spent
    if abs(spent.total_s - length_s) > _SAME_S * world.scenario.days:
        yield f"time_is_lost: the truth's parts sum to {spent.total_s:.3f} s of {length_s:.3f} s"
    sums: Mapping[str, float] = report.seconds_by_category
    if abs(sum(sums.values()) - report.elapsed_s) > _SAME_S * world.scenario.days:
        yield f"account_is_lost: the account's parts sum to {sum(sums.values()):.3f} s of {report.elapsed_s:.3f} s"
    useful, seen = spent.useful_s / length_s, sums["useful"] / length_s
    if abs(seen - useful) > _SAME_GOODPUT:
        yield f"account_is_wrong: {seen:.4f} of the time is useful by the account, and {useful:.4f} in truth"
    if world.control.has_ended:
        return
    plan = world.control.plan
    running = world.ranks.phase(plan.generation) if plan is not None else None
    trains = running is not None and running[0] is Phase.STEP
    last_fault_at = max((fault.at_s for fault in world.faults), default=0.0)
    for incident in world.control.memory.incidents.values():
        open_s = world.now - max(incident.opened_at, BEGAN_AT + last_fault_at)
        if trains and incident.state is IncidentState.VERIFYING:
            continue  # it repeats the steps that it went back, perhaps for days
        if not incident.state.closed and open_s > _OPEN_S and world.spares_suffice:
            what = f"{incident.incident_id} ({incident.cause}) for {open_s:.0f} s without a fault: {incident.message}"
            yield f"incident_left_open: {what}"
