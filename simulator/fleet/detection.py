"""When the production detector finds a fault: it is fed the reports of the hosts concerned, around the fault only.

A host sends hundreds of reports between two faults, and each says that nothing is wrong. So a detector is made for each
fault that nobody reports, and watches the hosts that the controller is shown from a little before it. What is fed is
what daemons send; what comes out, and when, is the detector's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from random import Random

import msgspec

from flyball.contracts.cluster import Activity, HostFacts, Phase, RankStatus
from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.reports.rank_columns import RankSteps, in_columns, steps_together
from flyball.contracts.reports.signals import EngineStatus, HostSilent, RankStalled, Report, SignalBody
from flyball.contracts.wire import WIRE_VERSION
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector
from services.sensor.detector.witnesses import neighbours
from services.sensor.rules.placed import given_in

REPORT_EVERY_S = 1.0
TICK_S = 0.25
LINK_LOST_AFTER_S = 1.0  # an engine's connection survives a shorter cut
_QUIET_REPORTS = 3  # of each host, before a silence
_KNOWN_STEPS = 12  # before a hang: the detector knows how long a step takes
_SILENCE_WITHIN_S = 120.0
_HANG_WITHIN_S = 7200.0


class DetectorFinding(msgspec.Struct, frozen=True):
    """A signal of the detector, and how long after the fault."""

    after_s: float
    body: SignalBody


class Watched(msgspec.Struct, frozen=True):
    """What a sensor sees of a job."""

    plan: GenerationPlan
    domains: Mapping[str, str]  # host -> failure domain
    step_s: float
    hang_timeout_s: float


def silence(watched: Watched, lost: Collection[str], rng: Random) -> list[DetectorFinding]:
    """How the detector reports hosts that are gone. Hosts that survive report that they cannot reach them."""
    found: list[DetectorFinding] = []
    missing = set(lost)
    for found_now in _watch(watched, lost, rng, _QUIET_REPORTS * REPORT_EVERY_S, _SILENCE_WITHIN_S, stalls=()):
        found.append(found_now)
        if isinstance(found_now.body, HostSilent):
            missing.discard(found_now.body.host_id)
        if not missing:
            break
    return found


def hang(watched: Watched, stalled: Collection[int], rng: Random) -> list[DetectorFinding]:
    """How the detector reports ranks that stand still; the others wait for them."""
    before_s = _KNOWN_STEPS * watched.step_s
    for found in _watch(watched, (), rng, before_s, _HANG_WITHIN_S, stalls=stalled):
        if isinstance(found.body, RankStalled):
            return [found]
    return []


def _watch(
    watched: Watched, lost: Collection[str], rng: Random, before_s: float, within_s: float, *, stalls: Collection[int]
) -> Iterator[DetectorFinding]:
    detector = FaultDetector(DetectorSettings(tick_interval_s=TICK_S))
    plan = watched.plan
    detector.set_neighbours(neighbours(plan.hosts, plan.peers))
    detector.set_placed({(plan.job, plan.generation): given_in(plan)})
    if watched.hang_timeout_s:
        detector.set_hang_timeouts({plan.job: watched.hang_timeout_s})
    names = [part.host_id for part in plan.hosts]
    next_at = {name: -before_s + rng.random() * REPORT_EVERY_S for name in names}
    reported = dict.fromkeys(names, -1)  # the newest step in a host's reports
    daemon = _Daemons(watched, before_s, lost, stalls)
    for tick in count():
        now_s = -before_s + tick * TICK_S
        if now_s > within_s:
            return
        for name in names:
            if next_at[name] > now_s or (name in lost and next_at[name] >= 0.0):
                continue
            at_s = next_at[name]
            next_at[name] += REPORT_EVERY_S
            report, reported[name] = daemon.report(name, at_s, reported[name])
            for body in detector.observe(report, at_s + before_s):
                yield DetectorFinding(max(0.0, at_s), body)
        for body in detector.tick(now_s + before_s):
            yield DetectorFinding(max(0.0, now_s), body)


class _Daemons:
    """The reports of all hosts' daemons. Times count from the fault."""

    def __init__(self, watched: Watched, before_s: float, lost: Collection[str], stalls: Collection[int]) -> None:
        self._watched, self._before_s, self._lost, self._stalls = watched, before_s, lost, stalls
        self._ranks = {part.host_id: part.ranks for part in watched.plan.hosts}
        self._incarnations = {name: f"{name}-1" for name in self._ranks}

    def report(self, name: str, at_s: float, reported: int) -> tuple[Report, int]:
        """The report of a host, and the newest step in it."""
        watched, plan = self._watched, self._watched.plan
        is_over = bool(self._stalls or self._lost)
        stepped_s = min(at_s, 0.0) if is_over else at_s
        newest = int((stepped_s + self._before_s) / watched.step_s) - 1
        moved_s = (newest + 1) * watched.step_s - self._before_s
        statuses, steps = [], []
        for rank in self._ranks[name]:
            age_s = max(0.0, at_s - moved_s)
            stands = at_s > watched.step_s and is_over
            doing = Activity.STOPPED if rank in self._stalls else Activity.IDLE
            statuses.append(
                RankStatus(
                    plan.job,
                    plan.generation,
                    rank,
                    1000 + rank,
                    Phase.STEP,
                    newest,
                    age_s,
                    doing if stands else Activity.UNKNOWN,
                    age_s if stands else 0.0,
                    "futex" if stands and doing is Activity.IDLE else "",
                )
            )
            at = tuple((step + 1) * watched.step_s - self._before_s for step in range(reported + 1, newest + 1))
            steps.append(RankSteps(plan.job, plan.generation, rank, reported + 1, at))
        workers, progress = in_columns(statuses)
        report = Report(
            version=WIRE_VERSION,
            incarnation=self._incarnations[name],
            sent_at=self._before_s + at_s,
            interval_s=REPORT_EVERY_S,
            facts=_facts(name, watched.domains.get(name, "")),
            engine=EngineStatus(alive=True, unreachable_peers=self._unreachable(name, at_s)),
            workers=workers,
            progress=progress,
            completed=steps_together(steps),
        )
        return report, newest

    def _unreachable(self, name: str, at_s: float) -> tuple[str, ...]:
        if not self._lost or at_s < LINK_LOST_AFTER_S:
            return ()
        peers: Sequence[str] = self._watched.plan.peers.get(name, ())
        owners = [owner for owner, holders in self._watched.plan.peers.items() if name in holders]
        return tuple(dict.fromkeys(peer for peer in (*peers, *owners) if peer in self._lost))


def _facts(name: str, domain: str) -> HostFacts:
    return HostFacts(name, "10.0.0.1", domain, f"{name}:7000", 29500, "0", 1)
