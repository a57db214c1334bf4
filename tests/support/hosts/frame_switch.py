"""A switch between network interfaces, in place of the kernel's bridge and its netem, which not every kernel has: it
drops, delays and counts what goes from one port to another, each direction by itself. It runs in a network namespace
that has the far ends of the hosts' cables:

    python frame_switch.py SEED PORT...

It reads one JSON object a line. {"from": PORT, "to": PORT, "delay_s": 0.1, "loss": 0.2} sets what happens to frames
between two ports; {} sets nothing. The answer to each is one line: the bytes handed on so far, {"PORT>PORT": bytes}.
"""

from __future__ import annotations

import heapq
import json
import random
import selectors
import socket
import sys
import time
from contextlib import suppress

ETH_P_ALL = 3
PACKET_OUTGOING = 4
FRAME_BYTES = 65_536
MAX_DELAYED = 20_000  # frames; beyond them it drops, as a router does
BUFFER_BYTES = 8 << 20


class Switch:
    def __init__(self, ports: list[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._ports = {name: self._open(name) for name in ports}
        self._way_to: dict[bytes, str] = {}  # hardware address -> port
        self._rules: dict[tuple[str, str], tuple[float, float]] = {}
        self._delayed: list[tuple[float, int, str, bytes]] = []
        self._number = 0
        self.passed: dict[str, int] = {f"{a}>{b}": 0 for a in ports for b in ports if a != b}

    def _open(self, name: str) -> socket.socket:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        port.bind((name, 0))
        port.setblocking(False)
        return port

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for name, port in self._ports.items():
                selector.register(port, selectors.EVENT_READ, name)
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "")
            while True:
                wait_s = self._delayed[0][0] - time.monotonic() if self._delayed else None
                for key, _ in selector.select(wait_s if wait_s is None else max(0.0, wait_s)):
                    if key.data:
                        self._receive(key.data)
                    elif not self._obey():
                        return
                while self._delayed and self._delayed[0][0] <= time.monotonic():
                    _, _, name, frame = heapq.heappop(self._delayed)
                    self._send(name, frame)

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False  # who started it is gone
        said = json.loads(line)
        if said:
            self._rules[said["from"], said["to"]] = (said["delay_s"], said["loss"])
        print(json.dumps(self.passed), flush=True)
        return True

    def _receive(self, name: str) -> None:
        for _ in range(64):  # so that one port does not starve the others
            try:
                frame, (_, _, kind, *_) = self._ports[name].recvfrom(FRAME_BYTES)
            except OSError:  # nothing is there, or the cable was pulled
                return
            if kind == PACKET_OUTGOING:
                continue
            self._way_to[frame[6:12]] = name
            known = self._way_to.get(frame[:6])
            for other in (known,) if known else self._ports:
                if other != name:
                    self._hand_on(name, other, frame)

    def _hand_on(self, name: str, other: str, frame: bytes) -> None:
        delay_s, loss = self._rules.get((name, other), (0.0, 0.0))
        if self._random.random() < loss or len(self._delayed) >= MAX_DELAYED:
            return
        self.passed[f"{name}>{other}"] += len(frame)
        if delay_s:
            self._number += 1
            heapq.heappush(self._delayed, (time.monotonic() + delay_s, self._number, other, frame))
        else:
            self._send(other, frame)

    def _send(self, name: str, frame: bytes) -> None:
        with suppress(OSError):  # its buffer is full, or the cable was pulled: the frame is lost
            self._ports[name].send(frame)


Switch(sys.argv[2:], int(sys.argv[1])).run()
