"""Names the rows of the database that cannot be decoded, in one incident. They are set aside, and the rest goes on."""

from __future__ import annotations

from flyball.contracts.decisions import DecisionKind
from services.controller.round.round import Round
from services.rules.incident_states import IncidentEvent
from services.rules.wording import NAMED, counted

ROW_UNREADABLE = "row_unreadable"


def take_in(round_: Round) -> None:
    """Open the incident, keep its message up to date, or close it. A view of part of the hosts adds to it only."""
    rows = round_.view.unreadable
    incident = next((i for i in round_.incidents.values() if i.cause == ROW_UNREADABLE and not i.state.closed), None)
    if not rows:
        if incident is not None and round_.view.is_whole:
            round_.advance(incident, IncidentEvent.CLEARED)
        return
    named = "; ".join(f"{row.key} of {row.table} ({row.reason})" for row in rows[:NAMED])
    more = f"; and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    message = (
        f"{counted(len(rows), 'row')} of the database cannot be read and {'is' if len(rows) == 1 else 'are'} left out: "
        f"{named}{more}. Everything else goes on. Next step: find out who changed the database; restore these rows "
        "from a backup, or remove them with the supervisor stopped."
    )
    if incident is None:
        incident = round_.open_incident(
            job="", host_id="", cause=ROW_UNREADABLE, message=message, generation=-1, observed_at=round_.now
        )
        round_.decide_incident(incident, DecisionKind.HOLD, "leave_out_rows_that_cannot_be_read", message)
    elif round_.view.is_whole and message != incident.message:
        round_.advance(incident, None, message=message)
