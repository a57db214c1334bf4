"""Supervisors in the tests' own process, and clients of any supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support.clocks.waits import DEADLINE_S

from flyball.contracts.credentials import host_credential
from services.main import Supervisor
from services.settings import load_settings


@contextmanager
def supervisor_in(state_dir: Path, **settings: Any) -> Iterator[Supervisor]:  # noqa: ANN401 - of the supervisor
    """One that serves at a free port, with its state in this folder."""
    supervisor = Supervisor(load_settings(state_dir=state_dir, **{"port": 0} | settings))
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()


def bearer(token: str, host_id: str = "") -> dict[str, str]:
    """The headers of an operator, or of a host's daemon."""
    return {"Authorization": f"Bearer {host_credential(token, host_id).token if host_id else token}"}


def client_of(supervisor: Supervisor, host_id: str = "", **options: Any) -> httpx.Client:  # noqa: ANN401 - of httpx
    headers = bearer(supervisor.token, host_id)
    return httpx.Client(base_url=supervisor.url, **{"headers": headers, "timeout": DEADLINE_S} | options)
