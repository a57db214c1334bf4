"""Replicas between real engines: who asks, who holds, and what a peer can be asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt_engine.peer_wire import Inventory, ListShards
from ckpt_engine.settings import EngineSettings
from ckpt_engine.transport.handshake import introduce
from ckpt_engine.transport.port import ByteCounters, Connection, Identity
from ckpt_engine.transport.tcp import connect_tcp
from flyball.contracts.checkpoints import Tier

if TYPE_CHECKING:
    from tests.integration.engine.conftest import Cluster, EngineHost, Trainer

Until = Callable[..., None]


def call(host: EngineHost) -> Connection:
    """A connection to an engine, as another engine makes it."""
    connection = connect_tcp(host.address, settings=EngineSettings(), total=ByteCounters())
    token = host.token_file.read_text().strip().encode()
    introduce(connection, identity=Identity("test", "127.0.0.1:1", "1"), token=token, timeout_s=5)
    return connection


def test_a_peer_says_what_it_holds_of_the_ranks_that_it_is_asked_for(
    cluster: Cluster, trainer: type[Trainer], until: Until
) -> None:
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first, second = trainer(a, 0), trainer(b, 1)
    for step in range(2):
        first.save(step)
        second.save(step)
    until(lambda: first.world_step == second.world_step == 1)
    with call(b) as connection:
        held = connection.request(ListShards("job", (0,)), Inventory, timeout_s=5).copies
        assert [(copy.step, copy.tier, copy.host_id) for copy in held] == [(1, Tier.PEER, "b"), (0, Tier.PEER, "b")]
        both = connection.request(ListShards("job", (0, 1)), Inventory, timeout_s=5).copies
        assert {(copy.step, copy.rank, copy.tier) for copy in both} >= {(1, 0, Tier.PEER), (1, 1, Tier.MEMORY)}
        assert connection.request(ListShards("another", (0,)), Inventory, timeout_s=5).copies == ()
    digests = {copy.digest for copy in a.status.copies if (copy.rank, copy.step) == (0, 1)}
    assert digests == {held[0].digest}
