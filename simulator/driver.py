"""Runs one seed: a cluster, its faults, and the checks. The same seed gives exactly the same run.

Detector, policy, loop, executor and playbook are the services' own; time, chance, network, hosts and storage are
simulated. What is drawn, and what the world does, come from random streams of their own: without some of its faults a
seed has the same cluster, and the same others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import msgspec
import structlog

from flyball.contracts.cluster import HostState, JobState
from goodput.calculator import calculate
from services.controller.replay import StoredRound
from services.sensor.detector.patience import StallSettings
from simulator.checks import history_checks, record_checks
from simulator.checks.history import CoreFault, Fact, fingerprint
from simulator.checks.record import Record
from simulator.checks.record_checks import Violation
from simulator.cluster import JOB, Cluster, Scenario, draw_scenario
from simulator.faults.faults import Fault, FaultKind, draw
from simulator.faults.injection import Injector
from simulator.fleet.arrivals import stream
from simulator.ports.memory import record_of
from simulator.watch import Livelock, Watch
from simulator.world.events import BEGAN_AT

FIRST_FAULT_AFTER_S = 15.0
RECOVER_WITHIN_S = 400.0  # after the last fault ended; several actions may have to time out first
# A rank may hang just before the database is lost. What a step usually takes was in it, so the hang is seen late.
RELEARN_WITHIN_S = StallSettings().first_step.unknown_s
LOOK_EVERY_S = 1.0
STEPS_TO_SEE = 3
SAME_S = 1e-3


class Run(msgspec.Struct, frozen=True):
    """The result of one seed."""

    seed: int
    scenario: Scenario
    faults: tuple[Fault, ...]
    simulated_s: float
    facts: list[Fact]
    record: Record
    rounds: tuple[StoredRound, ...]
    violations: list[Violation]
    fingerprint: str
    steps: int
    generations: int


def drawn(seed: int) -> tuple[Scenario, tuple[Fault, ...]]:
    """The cluster and the faults of a seed."""
    scenario = draw_scenario(stream(seed, "cluster"))
    count, within_s = scenario.faults, scenario.within_s
    return scenario, draw(stream(seed, "faults"), count=count, first_after_s=FIRST_FAULT_AFTER_S, within_s=within_s)


def run(seed: int, *, scenario: Scenario | None = None, faults: tuple[Fault, ...] | None = None) -> Run:
    """Simulate one seed. `scenario` and `faults` replace those that the seed draws."""
    own_scenario, own_faults = drawn(seed)
    scenario, faults = scenario or own_scenario, own_faults if faults is None else faults
    cluster = Cluster(scenario, stream(seed, "world"))
    world, memory = cluster.world, cluster.memory
    watch = Watch(cluster)
    with _core_faults(cluster):
        injector = Injector(cluster)
        for fault in faults:
            injector.plan(fault)
        ended_early, is_back = None, False
        try:
            forgets = any(fault.kind is FaultKind.DATABASE_LOST for fault in faults)
            is_back = _simulate(cluster, injector, RECOVER_WITHIN_S + (RELEARN_WITHIN_S if forgets else 0.0))
        except Livelock as error:
            ended_early = Violation("livelock", str(error))
        except Exception as error:  # noqa: BLE001 - whatever the core raises is the seed's result
            ended_early = Violation("crash", where(error))
        record = record_of(memory)
        if ended_early is None:
            violations = [
                *watch.violations,
                *record_checks.check_record(record, now=world.now, bound_s=RECOVER_WITHIN_S),
                *history_checks.check_history(world.facts, record),
                *_left_undone(cluster, is_back=is_back),
                *record_checks.check_replay(memory.rounds, record),
                *_intervals(cluster),
            ]
        else:
            violations = [ended_early, *watch.violations, *history_checks.check_history(world.facts, record)]
    return Run(
        seed=seed,
        scenario=scenario,
        faults=faults,
        simulated_s=world.now - BEGAN_AT,
        facts=world.facts,
        record=record,
        rounds=tuple(memory.rounds),
        violations=violations,
        fingerprint=fingerprint(world.facts, record),
        steps=world.truth.newest,
        generations=len(memory.generations),
    )


def where(error: Exception) -> str:
    """An exception in one line, with the place that raised it."""
    *_, place = extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {place.name} ({Path(place.filename).name}:{place.lineno}): {error}"


def _intervals(cluster: Cluster) -> Iterator[Violation]:
    """The account of the event log gives every second to one category."""
    events = [event for event in cluster.memory.events if event.job in ("", JOB)]
    if not any(event.job for event in events):
        return
    report = calculate(events, now=cluster.world.now, job=JOB)
    total_s = sum(report.seconds_by_category.values())
    if abs(total_s - report.elapsed_s) > SAME_S or report.elapsed_s > cluster.world.now - BEGAN_AT + SAME_S:
        what = f"the parts of the account sum to {total_s:.3f} s of {report.elapsed_s:.3f} s"
        yield Violation("account_is_lost", what)


def _simulate(cluster: Cluster, injector: Injector, within_s: float) -> bool:
    """Run until all faults are over and training has advanced for a while, or `within_s` more have passed. Returns
    whether it advanced."""
    timeline, truth = cluster.timeline, cluster.world.truth
    while injector.running:
        timeline.run_until(timeline.now + LOOK_EVERY_S)
    over_at, seen = timeline.now, -1
    while timeline.now < over_at + within_s:
        timeline.run_until(timeline.now + LOOK_EVERY_S)
        if not _is_well(cluster):
            seen = -1
        elif seen < 0:
            seen = truth.newest
        elif truth.newest >= seen + STEPS_TO_SEE:
            return True
    return False


def _is_well(cluster: Cluster) -> bool:
    memory = cluster.memory
    return (
        all(incident.state.closed for incident in memory.incidents.values())
        and all(action.state.ended for action in memory.actions.values())
        and memory.jobs.keys() == {JOB}
        and memory.jobs[JOB].state is JobState.RUNNING
        and not _not_committed(cluster)
    )


def _not_committed(cluster: Cluster) -> list[str]:
    """Hosts with uncommitted signals and a daemon to send them."""
    return [name for name, host in cluster.world.hosts.items() if host.has_uncommitted and host.is_daemon_up]


def _left_undone(cluster: Cluster, *, is_back: bool) -> Iterator[Violation]:
    memory, world = cluster.memory, cluster.world
    for incident in memory.incidents.values():
        if not incident.state.closed:
            what = f"{incident.incident_id} ({incident.cause}) is still {incident.state.value}: {incident.message}"
            yield Violation("incident_left_open", what)
    if not is_back:  # even if all seems well but no rank completes a step
        job = memory.jobs.get(JOB)
        state = f"{job.state.value}: {job.message}" if job is not None else "not there"
        yield Violation("training_not_back", f"the job is {state}, at step {world.truth.newest}")
    known = {(job, row.generation) for job, row in memory.jobs.items() if not row.state.ended}
    unknown = history_checks.granted_twice(world.facts)
    for name, host in world.hosts.items():
        row = memory.hosts.get(name)
        is_cordoned = row is not None and row.state is HostState.CORDONED  # left to an operator
        for group, worker in host.workers.values():
            if group.generation in unknown:
                continue
            if (group.job, group.generation) not in (memory.generations if is_cordoned else known):
                what = f"rank {worker.rank} of generation {group.generation} runs on {name}, unknown to the database"
                yield Violation("unsupervised", what)
    if waiting := _not_committed(cluster):
        yield Violation("signal_not_committed", f"the spool of {', '.join(waiting)} is not empty")


@contextmanager
def _core_faults(cluster: Cluster) -> Iterator[None]:
    """Turn errors that the core logs into facts, and drop the rest, whose formatting would dominate the run time."""

    def keep(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        text = str(event.pop("event"))
        event.pop("exc_info", None)
        cluster.world.note(CoreFault(cluster.world.now, text, str(dict(sorted(event.items())))))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)
