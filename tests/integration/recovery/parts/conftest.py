"""The control plane as four processes over one database, behind one address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.jobs.recovered import RecordedJob
from support.servers.ingress import Ingress
from support.servers.stack import PATIENT
from support.stores.ledger import Ledger


@pytest.fixture(scope="module")
def job(make_stack) -> Iterator[RecordedJob]:
    """Two ranks on two hosts, supervised by four processes."""
    stack = make_stack(FLYBALL_LEASE_TTL_S="2.0", **PATIENT)
    for name in ("api", "sensor", "controller", "actuator"):
        stack.add_part(name)
    ingress = Ingress(lambda name: int(stack.parts[name].port))
    stack.daemons_url = ingress.url
    stack.start_parts()
    stack.add_hosts("host-a", "host-b")
    yield stack.train("apart", nnodes=2, nproc_per_node=1)
    ingress.close()


@pytest.fixture
def ledger(job) -> Ledger:
    return Ledger(job)
