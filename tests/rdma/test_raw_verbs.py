"""The virtual machines are fit for the other tests: bytes go by RDMA between two processes, or two kernels."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

import pytest
from other_host import OtherMachine

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
SIZE_BYTES = 64 << 20
BLOCK_BYTES = 1_000_003  # a prime: no two pages are alike, so none can be in another's place


@pytest.mark.parametrize("where", ["this_host", "other_host"])
def test_64_mib_are_written_to_the_other_side_and_read_back(where: str, request: pytest.FixtureRequest) -> None:
    import pyverbs.enums as e
    from raw_verbs import Endpoint, hear, say

    host: OtherMachine = request.getfixturevalue(where)
    block = random.Random(1).randbytes(BLOCK_BYTES)
    bytes_here = (block * (SIZE_BYTES // BLOCK_BYTES + 1))[:SIZE_BYTES]
    own = Endpoint(SIZE_BYTES)
    program = Path(__file__).with_name("raw_verbs.py")
    peer = host.start(sys.executable, str(program), str(SIZE_BYTES))
    port = int(peer.line("port "))
    sent_before = int((COUNTERS / "sent_pkts").read_text())
    with socket.create_connection((host.address, port), 30) as connection, connection.makefile("rw") as wire:
        say(wire, own.where())
        own.connect(hear(wire))

        own.memory[:] = bytes_here
        write_s = own.transfer(e.IBV_WR_RDMA_WRITE)
        say(wire, {})
        assert hear(wire)["content"] == own.content()

        own.memory[:] = bytes(SIZE_BYTES)
        read_s = own.transfer(e.IBV_WR_RDMA_READ)
        assert own.memory[:] == bytes_here
    assert peer.wait() == 0
    assert int((COUNTERS / "sent_pkts").read_text()) - sent_before >= SIZE_BYTES / 4096
    own.close()
    print(f"WRITE {64 / write_s:.0f} MiB/s, READ {64 / read_s:.0f} MiB/s")
