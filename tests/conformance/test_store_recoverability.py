"""What the pages read: what a job would lose, and all hosts in short."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import NotFound
from flyball.contracts.reports.drains import DrainRequest
from services.store.decisions.drain_store import SqlDrainStore
from services.store.read.read_models import SqlReadModels
from services.store.sql.tables import UNKNOWN_JOBS, hosts

T = 1000.0


def test_the_loss_of_a_host_costs_what_its_peer_does_not_have(stores, make) -> None:
    reads = SqlReadModels(stores.db)
    with pytest.raises(NotFound):
        reads.recoverability("job")
    stores.run_job()

    def copies(host: str, ranks: tuple[int, ...], step: int, tier: Tier) -> tuple[ShardCopy, ...]:
        return tuple(ShardCopy("job", 1, step, rank, tier, host, 1, "d") for rank in ranks)

    held = {
        "host-a": (*copies("host-a", (0, 1), 7, Tier.MEMORY), *copies("host-a", (2, 3), 5, Tier.PEER)),
        "host-b": (*copies("host-b", (2, 3), 7, Tier.MEMORY), *copies("host-b", (0, 1), 5, Tier.PEER)),
    }
    held["host-a"] += copies("host-a", (0, 1), 5, Tier.MEMORY)
    held["host-b"] += copies("host-b", (2, 3), 5, Tier.MEMORY)
    stores.status.record_reports(
        [(make.report(host, copies=mine, sent_at=T + 1), T + 1) for host, mine in held.items()]
    )
    found = reads.recoverability("job")
    with stores.db.write() as connection:  # as if the list of its jobs were too long
        connection.execute(update(hosts).where(hosts.c.host_id == "host-b").values(copies_of=UNKNOWN_JOBS))
    assert reads.recoverability("job") == found
    assert {rung["tier"]: rung["step"] for rung in found["tiers"]} == {
        "memory": 7,
        "peer": 5,
        "disk": -1,
        "persistent": -1,
    }
    losses = {case["lost"]: (case["recovery_step"], case["tier"], case["costly_cases"]) for case in found["losses"]}
    assert losses["processes"] == (7, "memory", 0)
    assert losses["host"] == (5, "peer", 2)
    assert losses["everything"] == (-1, None, 1)


def test_all_hosts_in_short(stores, make) -> None:
    stores.run_job()
    stores.status.record_reports([(make.report("host-c"), T)])
    SqlDrainStore(stores.db).drain("host-b", DrainRequest(60.0), T)
    found = SqlReadModels(stores.db).host_map()
    assert found["states"]["healthy"] == 3 and sum(found["states"].values()) == 3
    cells = {
        host: (job, mark)
        for domain in found["items"]
        for host, job, mark in zip(domain["host_ids"], domain["jobs"], domain["marks"], strict=True)
    }
    assert cells == {"host-a": ("job", ""), "host-b": ("job", "drain"), "host-c": ("", "")}
