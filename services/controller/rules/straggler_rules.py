"""Rules for a rank that computes longer than the others, which wait for it in every step.

The job trains on. A move to a spare costs a restart, so it is made only if it is expected to gain more.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import DecisionKind, Incident, IncidentState
from flyball.contracts.reports.signals import Signal
from flyball.contracts.reports.training_health import Straggler, StragglerRecovered
from services.controller.round import expected_cost, pace, plans
from services.controller.round.diagnosis import STRAGGLER, newest_common_step
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Evidence, Verdict
from services.controller.round.view import JobView, PastFailure
from services.controller.rules import recovery_rules
from services.rules.incident_states import IncidentEvent

_LOOK_AGAIN_S = 60.0
_ASK_AGAIN_S = 5.0
# A sensor names a straggler again every 300 s, at the end of a window, which may take longer.
_STALE_AFTER_S, _STALE_AFTER_WINDOWS = 900.0, 10


class _Expected(msgspec.Struct, frozen=True):
    """What a move to a spare is expected to gain and to cost, in seconds."""

    gain_s: float
    cost_s: float
    horizon_s: float

    @property
    def numbers(self) -> str:
        """Both numbers, for a reason."""
        gain = f"{self.gain_s:.0f} s in {self.horizon_s:.0f} s"
        return f"a move is expected to gain {gain}, and to cost {self.cost_s:.0f} s"

    @property
    def evidence(self) -> Evidence:
        return {"gain_s": round(self.gain_s, 1), "cost_s": round(self.cost_s, 1)}


def take_signal(round_: Round, signal: Signal) -> None:
    """Open the job's incident for a straggler of its newest generation, or renew it. Close an undecided one if the rank
    is as fast as the others again. Ignore other signals."""
    body = signal.body
    if not isinstance(body, Straggler | StragglerRecovered):
        return
    job = round_.jobs.get(body.job)
    generation = job.generation if job is not None and job.state is JobState.RUNNING else None
    if job is None or generation is None or generation.generation != body.generation:
        return
    home = next((part.host_id for part in generation.hosts if body.rank in part.ranks), "")
    known = next((incident for incident in round_.open_incidents(body.job) if incident.cause == STRAGGLER), None)
    if isinstance(body, StragglerRecovered):
        if known is not None and known.state is IncidentState.DECIDING and known.host_id == home:
            round_.advance(known, IncidentEvent.CLEARED, lost_steps=0)
        return
    excess_s = max(0.0, body.compute_s - body.usual_s)
    expires_at = round_.now + _STALE_AFTER_S + _STALE_AFTER_WINDOWS * body.steps * body.compute_s
    if known is not None and known.host_id == home:
        round_.advance(known, None, excess_s=excess_s, expires_at=expires_at)
    if known is not None or not home:
        return
    round_.open_incident(
        job=body.job,
        host_id=home,
        cause=STRAGGLER,
        message=(
            f"All ranks wait for rank {body.rank} on {home}: it computes {body.compute_s:.3g} s per step, "
            f"{body.compute_s / max(body.usual_s, 1e-9):.2f} times the usual {body.usual_s:.3g} s "
            f"of {body.ranks} ranks, in {body.windows} windows in a row."
        ),
        generation=body.generation,
        failed_step=newest_common_step(generation),
        observed_at=signal.at,
        excess_s=excess_s,
        expires_at=expires_at,
    )
    record = PastFailure(body.generation, STRAGGLER, str(body.rank), "", -1)
    round_.change_job(body.job, job.state, job.message, record)


def follow(round_: Round, job: JobView, incident: Incident) -> None:
    """Close an undecided incident with its generation, since the next one is measured anew, or if nobody has named the
    straggler again for long: its numbers are stale."""
    is_stale = 0.0 < incident.expires_at <= round_.now
    if is_stale or job.generation is None or job.generation.generation != incident.generation:
        round_.advance(incident, IncidentEvent.CLEARED)


def hold_if_a_move_did_not_help(case: Case) -> Verdict | None:
    """Hold if the same rank was a straggler in an earlier generation: then its work is larger, not its host slow."""
    own = [f for f in case.job.failures if f.cause == STRAGGLER]
    ranks = {f.error_kind for f in own if f.generation == case.this_incident.generation}
    earlier = [f for f in own if f.error_kind in ranks and f.generation < case.this_incident.generation]
    if not earlier:
        return None
    why = f"So it was in generation {earlier[-1].generation}: its work seems to be larger, which no host changes."
    return _hold(case, why, "a person", _LOOK_AGAIN_S)


def hold_if_a_move_costs_more(case: Case) -> Verdict | None:
    """Hold if a move to a spare is expected to cost more than the straggler does."""
    expected = _expected(case)
    if expected.gain_s > expected.cost_s:
        return None
    return _hold(case, f"That is not worth a restart: {expected.numbers}.", "an end of the generation", _LOOK_AGAIN_S)


def move_the_straggler(case: Case) -> Verdict | None:
    """Move the straggler's host's ranks to a spare, since that is expected to gain more than it costs."""
    incident, expected = case.this_incident, _expected(case)
    moved = recovery_rules.move(case, [incident.host_id], avoid=())
    if moved is None:
        return None
    reason = f"{moved.reason} It is worth it: {expected.numbers}."
    return msgspec.structs.replace(moved, reason=reason, evidence={**moved.evidence, **expected.evidence})


def hold_without_a_spare(case: Case) -> Verdict | None:
    """Hold until a host is free to take the straggler's ranks."""
    return _hold(case, f"No spare is free, though {_expected(case).numbers}.", "a spare host", _ASK_AGAIN_S)


# --- parts of the rules ----------------------------------------------------------------------------------------------


def _expected(case: Case) -> _Expected:
    generation, settings = case.this_generation, case.settings
    newest = newest_common_step(generation)
    step_s = pace.step_duration_s(case, newest)
    known = plans.known_step(case, generation.lineage, [part.host_id for part in generation.hosts])
    share = min(1.0, case.this_incident.excess_s / step_s) if step_s > 0.0 else 0.0
    horizon_s = settings.straggler_horizon_s
    move_s, _ = expected_cost.duration(case, DecisionKind.MIGRATE_TO_SPARE, settings.assumed_migration_s)
    return _Expected(share * horizon_s, move_s + max(0, newest - known) * step_s, horizon_s)


def _hold(case: Case, why: str, holding_for: str, for_s: float) -> Verdict:
    return Verdict(
        DecisionKind.HOLD,
        f"{case.this_incident.message} {why} Training goes on.",
        evidence={"host": case.this_incident.host_id, **_expected(case).evidence},
        holding_for=holding_for,
        hold_until=case.now + for_s,
    )
