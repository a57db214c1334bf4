from __future__ import annotations

import pytest
from support.jobs.placements import make_placement

from ckpt_engine.contracts import peer_plan as peers
from ckpt_engine.settings import EngineSettings, load_settings
from flyball.contracts.errors import ConfigurationError

PLACEMENT = make_placement(
    {name: (2 * i, 2 * i + 1) for i, name in enumerate("abcd")},
    peers={"a": ("b",), "b": ("c",), "c": ("d",), "d": ("a",)},
)


def test_every_host_watches_those_it_copies_to_and_from_and_the_coordinator() -> None:
    assert peers.coordinator_host(PLACEMENT) == "a"
    assert peers.linked_hosts(PLACEMENT, "a") == {"b", "c", "d"}
    assert peers.linked_hosts(PLACEMENT, "b") == {"a", "c"}
    assert peers.linked_hosts(PLACEMENT, "c") == {"a", "b", "d"}


def test_replicas_are_held_for_the_ranks_of_the_hosts_that_name_this_one() -> None:
    assert peers.replica_hosts(PLACEMENT, "b") == ("c",)
    assert peers.replicated_ranks(PLACEMENT, "b") == {0, 1}
    assert peers.local_ranks(PLACEMENT, "d") == (6, 7)
    assert peers.local_ranks(PLACEMENT, "a spare") == ()
    assert peers.replicated_ranks(PLACEMENT, "a spare") == frozenset()


def test_settings_come_from_the_environment_and_name_what_is_wrong() -> None:
    assert load_settings({}) == EngineSettings()
    assert load_settings({"FLYBALL_CKPT_PING_INTERVAL_S": "0.25"}).ping_interval_s == 0.25
    with pytest.raises(ConfigurationError, match="FLYBALL_CKPT_MAX_CONNECTIONS"):
        load_settings({"FLYBALL_CKPT_MAX_CONNECTIONS": "0"})
    with pytest.raises(ConfigurationError, match="FLYBALL_CKPT_IO_TIMEOUT_S"):
        load_settings({"FLYBALL_CKPT_IO_TIMEOUT_S": "soon"})
