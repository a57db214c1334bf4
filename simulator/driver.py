"""Runs one seed: a cluster, its faults, and the checks. The same seed gives exactly the same run.

Detector, policy, loop, executor and playbook are the services' own; time, chance, network, hosts and storage are
simulated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
import structlog

from flyball.contracts.cluster import HostState, JobState
from services.controller.replay import StoredRound
from simulator.checks import checkers
from simulator.checks.checkers import Violation
from simulator.checks.history import CoreFault, Fact, fingerprint
from simulator.checks.record import Record
from simulator.cluster import JOB, Cluster, Scenario, draw_scenario
from simulator.faults.faults import Fault, draw
from simulator.faults.injection import Injector
from simulator.ports.memory import record_of
from simulator.world.events import BEGAN_AT

FIRST_FAULT_AFTER_S = 20.0
RECOVER_WITHIN_S = 400.0  # after the last fault ended; several actions may have to time out first
LOOK_EVERY_S = 1.0
STEPS_TO_SEE = 3
MAY_SHRINK_EVERY = 4  # seeds


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


def run(seed: int, *, scenario: Scenario | None = None, faults: tuple[Fault, ...] | None = None) -> Run:
    """Simulate one seed. `scenario` and `faults` replace those that the seed draws."""
    rng = Random(seed)
    scenario = scenario or draw_scenario(rng, may_shrink=seed % MAY_SHRINK_EVERY == MAY_SHRINK_EVERY - 1)
    drawn = draw(rng, count=scenario.faults, first_after_s=FIRST_FAULT_AFTER_S, within_s=scenario.within_s)
    faults = drawn if faults is None else faults
    cluster = Cluster(scenario, rng)
    with _core_faults(cluster):
        injector = Injector(cluster)
        for fault in faults:
            injector.plan(fault)
        is_back = _simulate(cluster, injector)
    record = record_of(cluster.memory)
    now = cluster.world.now
    violations = [
        *checkers.check_record(record, now=now, bound_s=RECOVER_WITHIN_S),
        *checkers.check_history(cluster.world.facts, record),
        *_left_undone(cluster, is_back=is_back),
        *checkers.check_replay(cluster.memory.rounds, record),
    ]
    return Run(
        seed=seed,
        scenario=scenario,
        faults=faults,
        simulated_s=now - BEGAN_AT,
        facts=cluster.world.facts,
        record=record,
        rounds=tuple(cluster.memory.rounds),
        violations=violations,
        fingerprint=fingerprint(cluster.world.facts, record),
        steps=cluster.world.truth.newest,
        generations=len(cluster.memory.generations),
    )


def _simulate(cluster: Cluster, injector: Injector) -> bool:
    """Run until all faults are over and training has advanced for a while, or time is up. Returns whether it
    advanced."""
    timeline, truth = cluster.timeline, cluster.world.truth
    while injector.running:
        timeline.run_until(timeline.now + LOOK_EVERY_S)
    over_at, seen = timeline.now, -1
    while timeline.now < over_at + RECOVER_WITHIN_S:
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
    unknown = checkers.granted_twice(world.facts)
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
