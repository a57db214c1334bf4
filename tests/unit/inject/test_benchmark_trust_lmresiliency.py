"""What the manager of LM Resiliency in the shoot-out of benchmarks/trust.py makes of reports and heartbeats."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from trust_bench.manager_lmresiliency import Heartbeats, Reports, Restorable, replacement


@pytest.fixture
def reports() -> Reports:
    return Reports(HashStore())


def test_what_failed_in_a_generation_is_nothing_of_the_next_one(reports: Reports) -> None:
    assert reports.why_failed(0) is None
    reports.failed(0, "InjectedFault()")
    assert (reports.why_failed(0), reports.why_failed(1)) == ("InjectedFault()", None)


def test_of_what_scout_reports_only_a_hang_ends_a_generation(reports: Reports) -> None:
    for kind in ("straggler", "data_stall", "checkpoint_stall"):
        reports.fault(3, {"kind": kind, "failed_ranks": [1]})
    assert reports.why_failed(3) is None
    reports.fault(3, {"kind": "hang", "failed_ranks": [0, 1]})
    assert reports.why_failed(3) == "SCOUT reports a hang of the ranks [0, 1]"


def test_the_newest_step_that_all_ranks_can_restore(reports: Reports) -> None:
    assert reports.common() is None
    reports.restorable(0, Restorable(12, "digest"))
    assert reports.common() is None, "rank 1 has none yet"
    reports.restorable(1, Restorable(12, "digest"))
    reports.restorable(0, Restorable(24, "digest"))
    assert reports.common() == Restorable(12, "digest")


def test_a_node_is_lost_when_its_heartbeat_stands_still() -> None:
    heartbeats = Heartbeats(timeout_s=10.0)
    assert heartbeats.is_lost("a", 0.0), "never heard"
    heartbeats.hear("a", b"1", 0.0)
    heartbeats.hear("a", b"1", 9.0)
    assert not heartbeats.is_lost("a", 9.9) and heartbeats.is_lost("a", 10.0)
    heartbeats.hear("a", b"2", 10.0)
    assert not heartbeats.is_lost("a", 19.9)


def test_a_live_standby_takes_the_slot_of_a_lost_node() -> None:
    heartbeats = Heartbeats(timeout_s=10.0)
    for node, heard_s in (("a", 8.0), ("b", 0.0), ("c", 0.0), ("d", 8.0)):
        heartbeats.hear(node, b"1", heard_s)
    assert replacement(("a", "b"), ("c", "d"), heartbeats, 9.0) is None, "none is lost"
    assert replacement(("a", "b"), ("c", "d"), heartbeats, 12.0) == (1, "d"), "c is lost as well"
    assert replacement(("a", "b"), ("c",), heartbeats, 12.0) is None, "no standby is left"
