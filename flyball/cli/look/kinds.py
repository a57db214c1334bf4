"""The kinds of things that `flyball get` lists: where the API has them, how they are filtered, and their columns.

A new kind is a row of KINDS.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flyball.cli.look.hosts_table import host_row
from flyball.cli.look.jobs_table import JOB_COLUMNS, job_row, known
from flyball.cli.show.times import clock, lasted
from flyball.contracts.errors import UsageError

Json = dict[str, Any]
Row = Callable[[Json, float], Sequence[object]]  # an item, and now


@dataclass(frozen=True)
class ListedKind:
    """One kind of thing."""

    name: str
    one: str
    path: str
    key: str  # the field by which it is named
    columns: Sequence[str]
    row: Row
    filters: Sequence[str]  # query parameters of the list
    wide_columns: Sequence[str] = ()
    wide_row: Row | None = None
    can_show_one: bool = True  # the API has path/NAME
    example: str = ""  # of a name

    def table(self, *, wide: bool) -> Sequence[str]:
        return (*self.columns, *(self.wide_columns if wide else ()))

    def cells(self, item: Json, now: float, *, wide: bool) -> Sequence[object]:
        return (*self.row(item, now), *(self.wide_row(item, now) if wide and self.wide_row else ()))


def _fields(*names: str) -> Row:
    return lambda item, _: [item.get(name) for name in names]


def _at(item: Json, now: float) -> str:
    return clock(item.get("opened_at") or item.get("started_at") or item.get("at"), now)


def _incident(item: Json, now: float) -> Sequence[object]:
    lost = known(item.get("lost_steps"))
    about = [item.get(name) for name in ("job", "cause", "state", "host_id")]
    return [item["incident_id"], _at(item, now), *about, lost, item.get("message")]


def _incident_wide(item: Json, _: float) -> Sequence[object]:
    began, ended = item.get("fault_at") or item.get("opened_at"), item.get("resolved_at")
    return [lasted(ended - began) if began and ended else None, ", ".join(item.get("decision_ids") or ())]


def _decision(item: Json, now: float) -> Sequence[object]:
    return [item["decision_id"], _at(item, now), *(item.get(name) for name in ("job", "kind", "reason"))]


def _action(item: Json, now: float) -> Sequence[object]:
    names = ("job", "kind", "state", "phase", "message")
    return [item["action_id"], _at(item, now), *(item.get(name) for name in names)]


def _action_wide(item: Json, _: float) -> Sequence[object]:
    ended = item.get("ended_at")
    return [lasted(ended - item["started_at"]) if ended else None, item.get("attempt"), item.get("incident_id")]


def _signal(item: Json, now: float) -> Sequence[object]:
    return [item["signal_id"], _at(item, now), *(item.get(name) for name in ("kind", "job", "host_id", "source"))]


def _signal_wide(item: Json, _: float) -> Sequence[object]:
    return [{name: value for name, value in item["body"].items() if name != "type" and value not in (None, "")}]


def _order(item: Json, now: float) -> Sequence[object]:
    until = clock(item["until"], now) if item["until"] else None
    return [item["kind"], item["target"], until, item["state"], item["message"] or item["reason"] or item["awaited"]]


def _audit(item: Json, now: float) -> Sequence[object]:
    who = item.get("operator") or item.get("role")
    about = [item.get(name) for name in ("client", "operation", "target")]
    return [item["audit_id"], _at(item, now), who, *about, item["code"] or item["status"]]


def _simulation(item: Json, now: float) -> Sequence[object]:
    if problem := item.get("problem"):
        return [item["name"], clock(item["written_at"], now), None, None, None, problem]
    account = item["goodput"]
    share = account["goodput"] if isinstance(account, dict) else account  # one alone has the whole account
    written = clock(item["written_at"], now) if "written_at" in item else None
    about = [item["scenario"], item["gpus"], f"{item['days']:g}"]
    return [item.get("name"), written, *about, None if share is None else f"{100 * share:.1f}%"]


TIERS = ("memory", "peer", "disk", "persistent")


def _checkpoints(item: Json, _: float) -> Sequence[object]:
    newest = [known(item["tiers"].get(tier, {}).get("newest_complete_step")) for tier in TIERS]
    return [item["job"], known(item["newest_step"]), known(item["recovery_point"]), *newest]


KINDS = (
    ListedKind(
        *("jobs", "job", "/v1/jobs", "job", JOB_COLUMNS, job_row),
        filters=("state", "since"),
        wide_columns=("ranks", "generation", "message"),
        wide_row=_fields("world_size", "generation", "message"),
        example="llama",
    ),
    ListedKind(
        *("hosts", "host", "/v1/hosts", "host_id", ("host", "state", "for", "job", "last report"), host_row),
        filters=("job", "state"),
        wide_columns=("address", "domain", "version", "reason"),
        wide_row=_fields("address", "failure_domain", "daemon_version", "reason"),
        example="host-b",
    ),
    ListedKind(
        *("incidents", "incident", "/v1/incidents", "incident_id"),
        ("incident", "at", "job", "cause", "state", "host", "lost", "what happened"),
        _incident,
        filters=("job", "host", "state", "since"),
        wide_columns=("took", "decisions"),
        wide_row=_incident_wide,
        example="inc-4",
    ),
    ListedKind(
        *("decisions", "decision", "/v1/decisions", "decision_id"),
        ("decision", "at", "job", "kind", "reason"),
        _decision,
        filters=("job", "since"),
        wide_columns=("rule", "incident", "action", "phase"),
        wide_row=_fields("rule", "incident_id", "action_state", "action_phase"),
        example="dec-17",
    ),
    ListedKind(
        *("actions", "action", "/v1/actions", "action_id"),
        ("action", "at", "job", "kind", "state", "phase", "message"),
        _action,
        filters=("job", "state", "since"),
        wide_columns=("took", "attempt", "incident"),
        wide_row=_action_wide,
        example="act-17",
    ),
    ListedKind(
        *("signals", "signal", "/v1/signals", "signal_id"),
        ("signal", "at", "kind", "job", "host", "source"),
        _signal,
        filters=("job", "host", "since"),
        wide_columns=("details",),
        wide_row=_signal_wide,
        can_show_one=False,
        example="sig-42",
    ),
    ListedKind(
        *("checkpoints", "checkpoint", "/v1/checkpoints", "job"),
        ("job", "newest step", "recovery point", *TIERS),
        _checkpoints,
        filters=("job",),
        can_show_one=False,
        example="llama",
    ),
    ListedKind(
        *("orders", "order", "/v1/orders", "target"),
        ("order", "target", "until", "state", "reason"),
        _order,
        filters=("state",),
        can_show_one=False,
        example="host-b",
    ),
    ListedKind(
        *("simulations", "simulation", "/v1/simulations", "name"),
        ("simulation", "written", "scenario", "GPUs", "days", "goodput"),
        _simulation,
        filters=(),
        wide_columns=("seed",),
        wide_row=_fields("seed"),
        example="llama3",
    ),
    ListedKind(
        *("audit", "audit", "/v1/audit", "audit_id"),
        ("request", "at", "role", "from", "operation", "target", "result"),
        _audit,
        filters=("since",),
        wide_columns=("details",),
        wide_row=_fields("detail"),
        can_show_one=False,
        example="aud-3",
    ),
)
NAMES = tuple(kind.name for kind in KINDS)


def find_kind(word: str) -> ListedKind:
    """The kind with this name, in the singular or the plural. Raises UsageError, which lists all."""
    for kind in KINDS:
        if word.lower() in (kind.name, kind.one):
            return kind
    near = difflib.get_close_matches(word.lower(), NAMES, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "choose one of these"
    raise UsageError(f"There is no kind {word!r}. The kinds are {', '.join(NAMES)}.", hint=hint)
