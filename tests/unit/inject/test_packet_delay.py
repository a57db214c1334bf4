"""The end of a delay: what is in the queue goes on, whatever the number."""

from __future__ import annotations

import socket
import struct
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from simulator.inject.kinds import network, packet_delay
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.packet_delay import DelayedPackets

PACKETS = 10


def message(number: int) -> bytes:
    """As the kernel tells of a packet."""
    header = struct.pack("=HH", 11, packet_delay.PACKET_HEADER) + struct.pack("!IHB", number, 0x0800, 0) + b"\0"
    return struct.pack("=IHHII", 20 + len(header), packet_delay.PACKET, 0, 0, 0) + b"\0\0\0\0" + header


def test_a_queue_is_closed_when_all_packets_have_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packet_delay, "READ_AT_ONCE", 4)
    ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    kernel.settimeout(60.0)
    queue = object.__new__(DelayedPackets)
    queue._number, queue._held, queue._socket = 7, deque([(1e12, 0)]), ours
    for number in range(1, PACKETS):
        kernel.send(message(number))
    queue.close()
    queue.close()
    told: list[int] = []
    while verdict := kernel.recv(4_096):
        assert struct.unpack_from("=H", verdict, 4)[0] == packet_delay.VERDICT_BATCH
        told.append(struct.unpack_from("!I", verdict, 28)[0])
    kernel.close()
    assert told == sorted(told) and told[-1] == PACKETS - 1


@pytest.mark.parametrize("fails", [False, True])
def test_rules_are_removed_before_the_queue_is_closed_and_it_is_closed_anyway(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    done: list[str] = []

    def run(_plan: Any, *words: str) -> str:  # noqa: ANN401
        done.append(words[5])
        if fails:
            raise OSError("no iptables")
        return "-A PREROUTING --queue-num 7 --queue-bypass"

    class Queue:
        def close(self) -> None:
            done.append("close")

    kind = KINDS["net-delay"]
    monkeypatch.setattr(network, "entry_of", lambda _: Path("/proc/self/ns/net"))
    monkeypatch.setattr(network, "_run", run)
    monkeypatch.setitem(kind._queues, "7", Queue())  # type: ignore[attr-defined]
    plan = {"namespace": "net:[1]", "queue": "7", "commands": ["iptables"]}
    if fails:
        with pytest.raises(OSError, match="no iptables"):
            kind.undo(plan)
        assert done == ["-S", "close"]
    else:
        kind.undo(plan)
        assert done == ["-S", "-D", "close"]
