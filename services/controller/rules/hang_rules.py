"""Rules for a generation that hangs: see where its ranks stand before anything is stopped."""

from __future__ import annotations

from typing import Any

from flyball.contracts.decisions import DecisionKind, Incident
from services.controller.round import plans
from services.controller.round.diagnosis import RANK_STALLED
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import ActionView, JobView
from services.rules import hang_findings
from services.rules.incident_states import IncidentEvent

# What the ranks do together (services.sensor.detector.stances). A stopped process needs no look, and a signal of an
# older sensor does not say.
_LOOKED_AT = frozenset({"dead", "stands", "stuck", "together", "world", "blocked", "working"})


def see_where_ranks_stand(case: Case) -> Verdict | None:
    """Take the stacks of all ranks, once, when a stall is reported. Only the round of the report does so: by the next,
    another failure may have changed what the ranks do."""
    incident, generation = case.incident, case.job.generation
    found = case.round.diagnoses.get(case.job.spec.job)
    if incident is None or generation is None or found is None or incident.cause != RANK_STALLED:
        return None
    if found.cause != RANK_STALLED or found.evidence.get("stance") not in _LOOKED_AT:
        return None
    looked = case.round.actions.get(incident.action_id)
    if (
        looked is not None
        and looked.plan.kind is DecisionKind.TAKE_STACKS
        and looked.plan.generation == found.generation
    ):
        return None
    plan = plans.stacks_plan(case, generation)
    if not plan.stop_hosts:
        return None
    return Verdict(
        DecisionKind.TAKE_STACKS,
        f"{incident.message} Before anything is stopped, the stacks of all ranks show where they stand.",
        plan=plan,
        evidence={**found.evidence, "generation": generation.generation},
        is_patient=True,
    )


def take_in_stands(round_: Round, job: JobView, incident: Incident, action: ActionView) -> None:
    """Say in the incident which rank the others wait for, and blame its host."""
    found = hang_findings.find(action.stands)
    facts: dict[str, Any] = {}
    if found is not None:
        facts["message"] = f"{incident.message} {found.sentence}"
        hosts = {rank.rank: rank.host_id for rank in job.generation.ranks} if job.generation else {}
        if host_id := hang_findings.host_of(found.culprits, hosts):
            facts["host_id"] = host_id
    round_.advance(incident, IncidentEvent.LOOKED, **facts)
