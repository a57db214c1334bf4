"""What the store takes of a host's word: about its own ranks, its own copies, and jobs in which it has ranks."""

from __future__ import annotations

import msgspec
from sqlalchemy import select

from flyball.contracts.checkpoints import CheckpointSpec, RestoreReport, ShardCopy, Tier
from flyball.contracts.decisions import CommandResult, RankPosition
from flyball.contracts.events import EventKind
from flyball.contracts.reports.host_checks import CheckMeasure
from flyball.contracts.reports.rank_stands import RankStand
from flyball.contracts.reports.signals import RankMarks
from services.store.sql import tables


def copy(host_id: str, *, job: str = "job", generation: int = 1, tier: Tier = Tier.MEMORY) -> ShardCopy:
    return ShardCopy(job, generation, 10**6, 0, tier, host_id, 9, "d")


def test_an_answer_counts_for_the_senders_own_ranks_copies_and_devices(stores, make) -> None:
    """host-a has ranks 0 and 1 of four."""
    stores.run_job()
    stores.begin_restart()
    own = CommandResult(
        positions=(RankPosition(0, 7), RankPosition(1, 8)),
        stands=(RankStand(1, "sleep"),),
        copies=(copy("host-a"), copy("", tier=Tier.PERSISTENT)),
        free_port=29_501,
        check=CheckMeasure("host-a", 1, ("host-a",)),
    )
    told = msgspec.structs.replace(
        own,
        positions=(*own.positions, RankPosition(2, 10**6), RankPosition(99, 10**6)),
        stands=(*own.stands, RankStand(3, "sleep")),
        copies=(*own.copies, copy("host-b"), copy("host-a", job="another")),
    )
    stores.actions.record(make.update("act-2.stop.host-a.1", result=told))
    (progress,) = stores.other_actions().open_actions()
    assert progress.commands[0].update.result == own
    other = msgspec.structs.replace(own, check=CheckMeasure("host-a", 1, ("host-a",)))
    stores.actions.record(make.update("act-2.stop.host-b.1", host_id="host-b", result=other))
    (progress,) = stores.other_actions().open_actions()
    kept = progress.commands[1].update.result
    assert (kept.positions, kept.stands, kept.check) == ((), (), None)
    assert [one.host_id for one in kept.copies] == [""]
    stores.actions.record(make.update("act-2.stop.host-a.1", host_id="host-b", result=own))
    assert stores.other_actions().open_actions() == [progress], "another host's command"


def test_moments_of_ranks_that_a_host_was_not_given_are_not_stored(stores, make) -> None:
    """Sensors let them pass while a generation is new to them."""
    stores.run_job()
    before = stores.log.last()
    marks = tuple(RankMarks("job", 1, rank, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0) for rank in (0, 3))
    restores = tuple(RestoreReport("job", 1, rank, 4, Tier.PEER, "", 9, 9, 0.2, 5.0) for rank in (1, 2))
    stores.status.record_reports([(make.report("host-a", sent_at=1010.0, marks=marks, restores=restores), 1010.0)])
    written = [(event.kind, event.rank) for _, event in stores.log.read(None, before, 100)]
    assert written == [(EventKind.RANK_MARKS, 0), (EventKind.RESTORED, 1)]


def test_copies_count_from_hosts_that_have_or_had_ranks_of_the_job(stores, make) -> None:
    stores.run_job()
    for name in ("host-a", "host-c"):
        copies = (copy(name), copy(name, job="unknown"))
        stores.status.record_reports([(make.report(name, sent_at=1010.0, copies=copies), 1010.0)])
    found = {(one.job, one.host_id) for one in stores.other_decisions().load_view().copies}
    assert ("job", "host-a") in found and ("job", "host-c") not in found
    stores.place("job", 2, "host-b")
    found = {(one.job, one.host_id) for one in stores.other_decisions().load_view().copies}
    assert ("job", "host-a") in found, "it had ranks of the generation that saved them"


def test_what_is_in_the_store_is_told_by_hosts_of_the_job_only(stores, make, monkeypatch) -> None:
    spec = CheckpointSpec(persistent_dir="/store", persistent_every_steps=10)
    monkeypatch.setattr(make, "spec", lambda spec_of=make.spec, **changes: spec_of(**{"checkpoint": spec} | changes))
    stores.run_job()

    def stored() -> list[int]:
        with stores.db.read() as connection:
            return sorted(connection.scalars(select(tables.persistent_steps.c.step)))

    for name, step in (("host-c", 10**6), ("host-a", 20)):
        copies = tuple(ShardCopy("job", 1, step, rank, Tier.PERSISTENT, "", 9, "d") for rank in range(4))
        stores.status.record_reports([(make.report(name, sent_at=1010.0, copies=copies), 1010.0)])
    assert stored() == [20]
