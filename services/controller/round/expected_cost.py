"""Weighs the courses open to a decision by their expected cost in rank seconds. Pure.

A cost is what the job loses until it is where it was: all ranks stand while it recovers, and then redo the steps since
the recovery point. Durations are medians of this job's own recoveries; without any, they are settings whose names begin
with `assumed_`. Rules decide in their order, not by cost: a cheaper course may be one that just failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import Alternative, DecisionKind, Incident
from services.controller.round import fewer_hosts, pace, plans
from services.controller.round.diagnosis import (
    BESIDE_FAILURES,
    CHECKPOINT_REQUESTED,
    DEPARTURES,
    HARMS,
    PREEMPTION_NOTICE,
    ROOM_TO_GROW,
    SUPERSEDED_WORKERS,
    newest_common_step,
)
from services.controller.round.round import Case
from services.controller.round.verdict import Verdict
from services.controller.round.view import GenerationView, HostView
from services.rules.wording import counted, listed

_NEXT_LOOK_S = 1.5  # a hold that is looked at again this soon has no end of its own


class _Facts(msgspec.Struct, frozen=True):
    """What all courses share."""

    world_size: int
    redo_steps: int
    redo_s: float
    reach_step: int  # the recovery point; -1: none
    replaced: tuple[str, ...]  # hosts that cannot keep their ranks
    missing_ranks: int  # of hosts that are gone or must be left, as far as no spare replaces them
    cannot_shrink: str  # why the job cannot go on without these; '' if it can
    free: int
    trains_on: bool  # the incident does not stop the ranks
    must_leave: bool  # ranks must leave a host that works
    is_taken_away: bool  # at the end of remaining_s, whatever is decided
    remaining_s: float  # until a host that must be left is gone; 0.0: no such host

    def gpu_s(self, seconds: float) -> float:
        return round(self.world_size * seconds, 1)

    @property
    def redo(self) -> str:
        if self.redo_steps <= 0:
            return "no step is redone"
        since = f"since the recovery point {self.reach_step}" if self.reach_step >= 0 else "from the beginning"
        return f"{self.redo_s:.1f} s to redo {counted(self.redo_steps, 'step')} {since}"


def weigh(case: Case, rule: str, verdict: Verdict) -> tuple[Alternative, ...]:
    """Return the courses that an incident leaves open, cheapest first; () where nothing is to be weighed: a decision
    without an incident, workers to be stopped anyway, or a save that an operator requested."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None or incident.cause in (SUPERSEDED_WORKERS, CHECKPOINT_REQUESTED):
        return ()
    facts = _facts(case, incident, generation, verdict)
    courses = {course.kind: course for course in _courses(case, incident, facts)}
    follows = DecisionKind.MIGRATE_TO_SPARE if facts.replaced else DecisionKind.RESTART_IN_PLACE
    if incident.cause == ROOM_TO_GROW:
        follows = DecisionKind.GROW
    chosen = courses.get(verdict.kind)
    if chosen is None:  # a rare one, for example to release parked ranks: it costs what the ranks stand
        chosen = Alternative(verdict.kind, 0.0, "No rank stops for it, and no step is redone.")
    courses[DecisionKind.HOLD] = _hold(case, facts, courses[follows])
    if verdict.plan is None:
        chosen = _hold(case, facts, courses[follows], until_s=verdict.hold_until - case.now)
    chosen = msgspec.structs.replace(chosen, is_feasible=True, is_chosen=True)
    others = [_compared(other, chosen, rule) for kind, other in courses.items() if kind is not verdict.kind]
    return tuple(sorted((chosen, *others), key=lambda course: (course.expected_cost_gpu_s, course.kind.value)))


class FewerHosts(msgspec.Struct, frozen=True):
    """What it costs to wait for a host, and to go on with fewer until then. rank seconds."""

    hold_gpu_s: float
    shrink_gpu_s: float
    wait_s: float
    missing_ranks: int

    @property
    def in_words(self) -> str:
        """Both costs, for a reason."""
        missing = "1 rank is missing" if self.missing_ranks == 1 else f"{self.missing_ranks} ranks are missing"
        return (
            f"If a host is free in {self.wait_s:.0f} s (assumed), to hold would cost {self.hold_gpu_s:.0f} rank "
            f"seconds more, and to go on {self.shrink_gpu_s:.0f}: {missing} until then, and then the job restarts once "
            "more."
        )

    @property
    def evidence(self) -> dict[str, float]:
        return {"hold_gpu_s": self.hold_gpu_s, "shrink_gpu_s": self.shrink_gpu_s}


def of_fewer(case: Case, incident: Incident, missing_ranks: int) -> FewerHosts:
    """Weigh a hold against fewer hosts. What both cost (a restart now, and the steps to redo) is left out."""
    wait_s, ranks = case.settings.assumed_spare_wait_s, case.job.spec.world_size
    grow_s, _ = duration(case, DecisionKind.GROW, case.settings.assumed_migration_s)
    trains_on = incident.cause in BESIDE_FAILURES
    return FewerHosts(
        hold_gpu_s=0.0 if trains_on else round(ranks * wait_s, 1),
        shrink_gpu_s=round(missing_ranks * wait_s + ranks * grow_s, 1),
        wait_s=wait_s,
        missing_ranks=missing_ranks,
    )


class MoreHosts(msgspec.Struct, frozen=True):
    """What further hosts are expected to gain, and what a planned restart onto them costs. rank seconds."""

    gain_gpu_s: float
    cost_gpu_s: float
    horizon_s: float

    @property
    def in_words(self) -> str:
        """Both numbers, for a reason."""
        gain = f"{self.gain_gpu_s:.0f} rank seconds in {self.horizon_s:.0f} s (assumed)"
        return f"to grow is expected to gain {gain}, and to cost {self.cost_gpu_s:.0f}"

    @property
    def evidence(self) -> dict[str, float]:
        return {"gain_gpu_s": self.gain_gpu_s, "cost_gpu_s": self.cost_gpu_s}


def of_more(case: Case, joining: Sequence[HostView]) -> MoreHosts:
    """Weigh the work of further hosts against a restart of all ranks."""
    settings, spec = case.settings, case.job.spec
    restart_s, _ = duration(case, DecisionKind.GROW, settings.assumed_migration_s)
    gain_gpu_s = len(joining) * spec.nproc_per_node * settings.grow_horizon_s
    return MoreHosts(round(gain_gpu_s, 1), round(spec.world_size * restart_s, 1), settings.grow_horizon_s)


def _facts(case: Case, incident: Incident, generation: GenerationView, verdict: Verdict) -> _Facts:
    hosts = case.round.hosts
    lost = [part for part in generation.hosts if case.round.is_silent(part.host_id)]
    missing_ranks, cannot_shrink = _without(case, incident, generation)
    leaving = [
        part.host_id
        for part in generation.hosts
        if part not in lost and (hosts[part.host_id].is_leaving or hosts[part.host_id].state in _UNFIT)
    ]
    reach = [part.host_id for part in generation.hosts if part not in lost]
    following = verdict.plan.next if verdict.plan is not None else None
    reach_step = following.known_step if following else plans.known_step(case, generation.lineage, reach)
    redo_steps = max(0, max(incident.failed_step, newest_common_step(generation)) - reach_step)
    deadlines = (h.preempt_deadline_at or (h.drain.deadline_at if h.drain else 0.0) for h in map(hosts.get, reach) if h)
    remaining_s = min((at - case.now for at in deadlines if at > case.now), default=0.0)
    return _Facts(
        world_size=case.job.spec.world_size,
        redo_steps=redo_steps,
        redo_s=redo_steps * pace.step_duration_s(case, reach_step + redo_steps) if redo_steps else 0.0,
        reach_step=reach_step,
        replaced=(*(part.host_id for part in lost), *leaving),
        missing_ranks=missing_ranks,
        cannot_shrink=cannot_shrink,
        free=len(case.free_hosts),
        trains_on=incident.cause in BESIDE_FAILURES or incident.cause in HARMS,
        must_leave=incident.cause in DEPARTURES,
        is_taken_away=incident.cause == PREEMPTION_NOTICE,
        remaining_s=remaining_s if incident.cause in DEPARTURES else 0.0,
    )


def _without(case: Case, incident: Incident, generation: GenerationView) -> tuple[int, str]:
    """The ranks of hosts that are gone or must be left, without those that spares may take, and why the job cannot go
    on without them."""
    hosts, left = case.round.hosts, incident.host_id if incident.cause in DEPARTURES else ""
    gone = [
        part
        for part in generation.hosts
        if case.round.is_silent(part.host_id) or hosts[part.host_id].is_broken or part.host_id == left
    ]
    fewer = fewer_hosts.without(case, generation, [part.host_id for part in gone], case.well_hosts)
    if fewer is not None:
        return case.job.spec.world_size - sum(len(part.ranks) for part in fewer), ""
    fewest = fewer_hosts.fewest(case, generation)
    is_too_few = len(generation.hosts) - len(gone) < fewest
    why = f" It needs {counted(fewest, 'host')}." if is_too_few else " A spare is free."
    return sum(len(part.ranks) for part in gone), why


_UNFIT = (HostState.CORDONED, HostState.IN_REPAIR, HostState.DEGRADED)


def _courses(case: Case, incident: Incident, facts: _Facts) -> Iterator[Alternative]:
    """Every course except to hold, whose cost follows from theirs."""
    if incident.cause == ROOM_TO_GROW:
        grow_s, grow = duration(case, DecisionKind.GROW, case.settings.assumed_migration_s)
        for kind in (DecisionKind.EMERGENCY_CHECKPOINT, DecisionKind.GROW):
            yield Alternative(
                kind, facts.gpu_s(grow_s), f"{_ranks(facts, 'save')} one step, for {grow}; no step is redone."
            )
        return
    restart_s, restart = duration(case, DecisionKind.RESTART_IN_PLACE, case.settings.assumed_restart_s)
    move_s, move = duration(case, DecisionKind.MIGRATE_TO_SPARE, case.settings.assumed_migration_s)
    why = f"{listed(facts.replaced)} cannot keep its ranks." if facts.replaced else ""
    yield Alternative(
        DecisionKind.RESTART_IN_PLACE,
        facts.gpu_s(restart_s + facts.redo_s),
        f"{_ranks(facts, 'stand')} for {restart}, and {facts.redo}.{f' {why}' if why else ''}",
        is_feasible=not facts.replaced,
    )
    needed = max(1, len(facts.replaced))
    missing = "" if facts.free >= needed else f" {counted(needed, 'host')} must be free, and {facts.free or 'none'} is."
    yield Alternative(
        DecisionKind.MIGRATE_TO_SPARE,
        facts.gpu_s(move_s + facts.redo_s),
        f"{_ranks(facts, 'stand')} for {move}, and {facts.redo}.{missing}",
        is_feasible=not missing,
    )
    if facts.must_leave:
        yield Alternative(
            DecisionKind.EMERGENCY_CHECKPOINT,
            facts.gpu_s(move_s),
            f"{_ranks(facts, 'save')} one step, for {move}; no step is redone.",
            is_feasible=case.job.spec.checkpoint.saves,
        )
    if facts.missing_ranks:
        fewer = of_fewer(case, incident, facts.missing_ranks)
        yield Alternative(
            DecisionKind.SHRINK,
            round(facts.gpu_s(restart_s + facts.redo_s) + fewer.shrink_gpu_s, 1),
            f"{_ranks(facts, 'stand')} for {restart}, {facts.redo}, the work of {facts.missing_ranks} is missing for "
            f"{fewer.wait_s:.0f} s (assumed) until a host is free, and then all restart once more."
            f"{facts.cannot_shrink}",
            is_feasible=not facts.cannot_shrink,
        )
    if not facts.trains_on:
        operator_s = case.settings.assumed_operator_s
        yield Alternative(
            DecisionKind.FAIL_JOB,
            facts.gpu_s(operator_s + facts.redo_s),
            f"{_ranks(facts, 'stand')} for {operator_s:.0f} s (assumed) until a person starts the job again, "
            f"and {facts.redo}.",
        )


def _hold(case: Case, facts: _Facts, after: Alternative, *, until_s: float = 0.0) -> Alternative:
    """To wait `until_s` (if that is only until the next look: until something changes), and then to do `after`."""
    if facts.remaining_s and facts.is_taken_away:
        left = f"All ranks train on for {facts.remaining_s:.1f} s; then the host is gone, and what follows costs"
        cost = after.expected_cost_gpu_s
        return Alternative(DecisionKind.HOLD, cost, f"{left} {cost:.0f} rank seconds.")
    if case.incident is not None and case.incident.cause == ROOM_TO_GROW:
        more = of_more(case, fewer_hosts.joining(case))
        lost = f"The work of the free hosts would be missing for {more.horizon_s:.0f} s (assumed)."
        return Alternative(DecisionKind.HOLD, more.gain_gpu_s, f"All ranks train on meanwhile. {lost}")
    if facts.trains_on:
        redone = counted(facts.redo_steps, "step")
        risk = f"A failure would cost {facts.gpu_s(facts.redo_s):.0f} rank seconds for {redone}."
        return Alternative(DecisionKind.HOLD, 0.0, f"All ranks train on meanwhile. {risk}")
    if until_s > _NEXT_LOOK_S:
        wait_s, wait = until_s, f"up to {until_s:.1f} s"
    elif facts.replaced:
        wait_s = case.settings.assumed_spare_wait_s
        wait = f"{wait_s:.0f} s (assumed) until a host is free"
    else:
        wait_s = case.settings.root_cause_window_s
        wait = f"{wait_s:.1f} s more"
    return Alternative(
        DecisionKind.HOLD,
        round(facts.gpu_s(wait_s) + after.expected_cost_gpu_s, 1),
        f"{_ranks(facts, 'stand')} for {wait}, and what follows costs {after.expected_cost_gpu_s:.0f} rank seconds.",
    )


def _compared(other: Alternative, chosen: Alternative, rule: str) -> Alternative:
    """Add why another course was not chosen."""
    more = other.expected_cost_gpu_s - chosen.expected_cost_gpu_s
    if not other.is_feasible:
        why = "Not possible now."
    elif more > 0.0:
        why = f"It would cost {more:.0f} rank seconds more."
    else:
        why = f"Not dearer, but the rule {rule} comes first."
    return msgspec.structs.replace(other, reason=f"{other.reason} {why}")


def duration(case: Case, kind: DecisionKind, assumed_s: float) -> tuple[float, str]:
    """The expected duration of a recovery in seconds, and in words where it is from."""
    known = [past.took_s for past in case.job.recoveries if past.kind is kind]
    if not known:
        return assumed_s, f"{assumed_s:.1f} s (assumed: this job had no such recovery yet)"
    took_s = median(known)
    return took_s, f"{took_s:.1f} s (median of {counted(len(known), 'such recovery', 'such recoveries')} of this job)"


def _ranks(facts: _Facts, do: str) -> str:
    return f"All {counted(facts.world_size, 'rank')} {do}" if facts.world_size > 1 else f"The only rank {do}s"
