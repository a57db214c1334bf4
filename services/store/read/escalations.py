"""What a person must hear of: jobs that failed, and incidents that were given up. Read for webhooks."""

from __future__ import annotations

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import IncidentState
from flyball.contracts.errors import NotFound
from flyball.contracts.events import Event, EventKind
from services.runtime.paging import Page
from services.store.read.unsent_events import Json, UnsentEvents

MAX_DECISIONS = 20  # the newest ones of an incident


class SqlEscalations(UnsentEvents):
    """The escalations that were not sent yet, in order."""

    cursor = "webhook"
    kinds = (EventKind.JOB_ENDED, EventKind.INCIDENT_CLOSED)

    def _story(self, event: Event) -> Json | None:
        """The whole story of an event, for a person who knows nothing yet; None if nobody has to know."""
        try:
            job = self._reads.job(event.job) if event.job else None
        except NotFound:  # removed since
            job = None
        has_failed = job is not None and job["state"] == JobState.FAILED.value
        if event.kind is EventKind.JOB_ENDED:
            if event.data.get("outcome") != JobState.FAILED.value:
                return None
            kind = "job_failed"
            incidents = self._reads.incidents(event.job, Page(limit=1))
        else:
            if event.data.get("state") != IncidentState.ESCALATED.value or has_failed:
                return None  # the job's failure is sent once
            kind = "incident_escalated"
            found = self._reads.incidents(event.job or None, Page(limit=50))
            incidents = [incident for incident in found if incident["incident_id"] == event.incident_id]
        incident = incidents[-1] if incidents else None
        ids = incident["decision_ids"][-MAX_DECISIONS:] if incident else []
        return {
            "event": kind,
            "at": event.at,
            "job": _shortened(job) if job else None,
            "incident": incident,
            "decisions": [self._decision(decision_id) for decision_id in ids],
        }

    def _decision(self, decision_id: str) -> Json:
        """A decision without its incident, which is sent once, and without its commands."""
        found = self._reads.decision(decision_id)
        action = found.pop("action")
        found.pop("incident")
        state = {name: action[name] for name in ("action_id", "state", "message")} if action else None
        return found | {"action": state}


def _shortened(job: Json) -> Json:
    """A job without its ranks and its specification: there may be very many, and the environment is nobody's news."""
    return {name: value for name, value in job.items() if name not in ("ranks", "spec")}
