"""What every route of the API answers, and the problems among that."""

from __future__ import annotations

import re

import httpx
from support.servers.api_here import ApiHere

from services.api.auth import ACCESS

QUERIES = {
    "/v1/goodput": "?job=job&timeline_bins=3",
    "/v1/checkpoints": "?job=job",
    "/v1/goodput/comparison": "?a=job:job&b=job:job",
    "/goodput/run": "?run=job:job",
    "/goodput/comparison": "?run=job:job&with=job:job",
}
# Of a simulation, which is a file; without an end; by an actuator, from a daemon (tests of those are elsewhere).
ELSEWHERE = {
    *("/v1/simulations/{name}", "/v1/stream", "/v1/jobs/{job}/logs", "/static/{path:path}"),
    *("/v1/hosts/{host_id}/commands", "/v1/hosts/{host_id}/departure"),
}
NAMES = {"job": "job", "host_id": "host-a", "incident_id": "inc-1", "decision_id": "dec-2", "action_id": "act-2"}
ADDRESSES = tuple(
    re.sub(r"{(\w+)}", lambda found: NAMES[found[1]], path) + QUERIES.get(path, "")
    for method, path in ACCESS
    if method == "GET" and path not in ELSEWHERE
)


# What a reply that is about such a row says: it is there, and cannot be read.
SUBJECTS = {
    "jobs": ("job",),
    "incidents": ("inc-1",),
    "hosts": ("host-a",),
    "actions": ("act-2",),
    "decisions": ("dec-2", "act-2"),
}


def problems(api: ApiHere, table: str = "") -> dict[str, str]:
    """Return what is wrong with replies: anything but what was asked for, or that their subject cannot be read."""
    return {
        address: f"{reply.status_code} {reply.text[:300]}"
        for address, reply in api.get(ADDRESSES).items()
        if reply.status_code not in (200, 303) and not _says_why(table, address, reply)
    }


def _says_why(table: str, address: str, reply: httpx.Response) -> bool:
    if reply.status_code != 404:
        return False
    if table == "events":
        return "goodput" in address  # no event at all can be read: there is nothing to report
    return any(name in address for name in SUBJECTS.get(table, ())) and "cannot be read" in reply.text
