"""A job by its name, and what a wrong name may have meant."""

from __future__ import annotations

from typing import Any

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.local_runs import known_names
from flyball.contracts.errors import NotFound


def get_job(client: ApiClient, name: str) -> dict[str, Any]:
    """The job. Raises NotFound that says which names are near, or known."""
    try:
        found: dict[str, Any] = client.get(f"/v1/jobs/{name}")
    except NotFound:
        known = [str(job["job"]) for job in reversed(client.items("/v1/jobs"))]
        raise NotFound(f"{client.url} knows no job {name}.", hint=known_names(name, known)) from None
    return found
