"""An incident as a story: what was observed, what was suspected, decided and done, and whether training went on."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from flyball.contracts.decisions import Decision, DecisionKind
from services.record.codec import load, number_of
from services.store.read import read_history
from services.store.read.incident_signals import signals_before
from services.store.sql import tables
from services.store.sql.set_aside import readable

Json = dict[str, Any]
MAX_DECISIONS = 100  # the newest


def incident(connection: Connection, number: int) -> list[Json]:
    """Return one incident with everything that belongs to it; an empty list if there is none with that number."""
    return [found | _parts(connection, number, found) for found in read_history.incidents(connection, None, [number])]


def _parts(connection: Connection, number: int, found: Json) -> Json:
    numbers = [number, *map(number_of, found["parts"])]  # what was observed and decided about its parts belongs to it
    observed = [signal for one in numbers for signal in signals_before(connection, one, float("inf"))]
    observed.sort(key=lambda signal: signal["stored_at"])
    query = (
        select(tables.decisions.c.number, tables.decisions.c.incident, tables.decisions.c.document)
        .where(tables.decisions.c.incident.in_(numbers))
        .order_by(tables.decisions.c.number.desc())
        .limit(MAX_DECISIONS)
    )
    rows = connection.execute(query).all()[::-1]
    bases = ((row, readable("decisions", f"dec-{row.number}", _basis, row.document)) for row in rows)
    decided = [
        basis
        | {
            "action": read_history.action(connection, row.number),
            "stands": read_history.stands(connection, row.incident, row.number),
        }
        for row, basis in bases
        if basis is not None
    ]
    return {"observed": observed, "decided": decided, "story": _story(found, observed, decided)}


def _basis(document: str) -> Json:
    return read_history.decision_basis(load(document, Decision))


def _story(found: Json, observed: list[Json], decided: list[Json]) -> list[Json]:
    """Return one line for everything that happened, in the order of time."""
    lines = [_line(signal["at"], "signal", signal["kind"], f"observed by {signal['source']}") for signal in observed]
    lines += [_line(change["at"], "state", change["state"], change["message"]) for change in found["timeline"]]
    for decision in decided:
        lines.append(_line(decision["at"], "decision", decision["kind"], decision["reason"], decision["decision_id"]))
        lines += [
            _line(
                decision["at"],
                "alternative",
                course["kind"],
                f"{course['expected_cost_gpu_s']:.0f} rank s: {course['reason']}",
                decision["decision_id"],
            )
            for course in decision["alternatives"]
            if not course["is_chosen"]
        ]
        action = decision["action"]
        if action is not None and decision["kind"] != DecisionKind.HOLD:
            lines += [
                _line(
                    *(step["at"], "action", ": ".join(filter(None, (step["phase"], step["state"])))),
                    *(step["message"], action["action_id"]),
                )
                for step in action["phases"]
            ]
    return sorted(lines, key=lambda line: line["at"])  # stable: what happened at once stays in this order


def _line(at: float, part: str, what: str, detail: str, about: str = "") -> Json:
    return {"at": at, "part": part, "what": what, "detail": detail, "about": about}
