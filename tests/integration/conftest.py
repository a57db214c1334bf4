"""What holds for every test with real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flyball.cli.reach import client
from host_daemon.link import http_client

PATIENCE_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def _patient_clients() -> Iterator[None]:
    """Clients in this process wait for a supervisor that is held up for seconds, which on a busy machine happens; how
    long they wait by themselves is a matter of unit tests."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (client, http_client):
            for name in ("CONNECT_TIMEOUT_S", "ANSWER_TIMEOUT_S"):
                patch.setattr(module, name, PATIENCE_S)
        yield
