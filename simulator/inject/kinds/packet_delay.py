"""Holds packets back in the kernel's queue for user space (NFQUEUE), and lets each go on after a delay.

The kernel keeps the packets: only their numbers come here. It lets them pass at once if the queue is full, or if nobody
reads it any more. Messages are those of linux/netfilter/nfnetlink_queue.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flyball.contracts.errors import ConfigurationError

NETLINK_NETFILTER = 12
SO_RCVBUFFORCE = 33
CLONE_NEWNET = 0x40000000
PACKET, CONFIG, VERDICT_BATCH = 0x300, 0x302, 0x303  # kinds of messages: subsystem 3 is the queues'
ERROR_MESSAGE = 2
REQUEST, ACKNOWLEDGE = 1, 4
COMMAND, COPY, LONGEST, MASK, FLAGS = 1, 2, 3, 4, 5  # attributes of CONFIG
BIND, NUMBERS_ONLY, FAIL_OPEN, WHOLE_SEGMENTS = 1, 1, 1, 4
PACKET_HEADER, VERDICT_HEADER = 1, 2  # attributes of PACKET and VERDICT_BATCH
ACCEPT = 1
HEADER_BYTES = 20  # of netlink, and of netfilter
MESSAGE_BYTES = 65_536
BUFFER_BYTES = 8 << 20
MOST_PACKETS = 100_000
READ_AT_ONCE = 256
LOOK_INTERVAL_S = 0.05  # for the end of the fault


class DelayedPackets:
    """One queue of a network namespace. What is in it goes on at the end, if by then nothing more is sent there."""

    def __init__(self, namespace: Path, number: int) -> None:
        """`namespace`: a file that stands for it, as /proc/PID/ns/net. `number`: of the queue; the rules that send
        packets there are the caller's. Raises ConfigurationError if the kernel refuses."""
        self._number = number
        self._held: deque[tuple[float, int]] = deque()  # (monotonic moment of going on, number), in order
        try:
            self._socket = _socket_in(namespace)
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
            self._configure(_attribute(COMMAND, struct.pack("!BxH", BIND, socket.AF_UNSPEC)))
            self._configure(
                _attribute(COPY, struct.pack("!IB", 0, NUMBERS_ONLY))
                + _attribute(LONGEST, struct.pack("!I", MOST_PACKETS))
                + _attribute(MASK, struct.pack("!I", FAIL_OPEN | WHOLE_SEGMENTS))
                + _attribute(FLAGS, struct.pack("!I", FAIL_OPEN | WHOLE_SEGMENTS))
            )
            self._socket.setblocking(False)
        except OSError as error:
            raise ConfigurationError(
                f"The kernel gives no queue for packets: {error.strerror}.",
                hint="it needs CAP_NET_ADMIN, and a kernel with nfnetlink_queue",
            ) from error

    def serve(self, delay_s: float, over: threading.Event) -> None:
        """Until `over` is set."""
        while not over.is_set():
            wait_s = (
                max(0.0, min(LOOK_INTERVAL_S, self._held[0][0] - time.monotonic())) if self._held else LOOK_INTERVAL_S
            )
            select.select([self._socket], [], [], wait_s)
            now_s = time.monotonic()
            self._take(now_s + delay_s)
            self._let_go(now_s)

    def close(self) -> None:
        """May be repeated."""
        if self._socket.fileno() < 0:
            return
        for _ in range(1 + MOST_PACKETS // READ_AT_ONCE):
            is_more = self._take(0.0)
            self._let_go(float("inf"))
            if not is_more:
                break
        self._socket.close()

    def _take(self, due_s: float) -> bool:
        """The numbers of the packets that came. All at once they could be too many: then the next turn takes more;
        whether there may be."""
        for _ in range(READ_AT_ONCE):
            try:
                message = self._socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # some were not told, and passed at once
                    raise
                continue
            if struct.unpack_from("=H", message, 4)[0] == PACKET:
                self._held.append((due_s, _packet_number(message)))
        return True

    def _let_go(self, now_s: float) -> None:
        number = -1
        while self._held and self._held[0][0] <= now_s:
            number = self._held.popleft()[1]
        if number >= 0:  # this one, and all before it
            self._send(VERDICT_BATCH, REQUEST, _attribute(VERDICT_HEADER, struct.pack("!II", ACCEPT, number)))

    def _configure(self, attributes: bytes) -> None:
        self._send(CONFIG, REQUEST | ACKNOWLEDGE, attributes)
        kind, code = 0, 0
        while kind != ERROR_MESSAGE:  # as which the acknowledgement comes, with code 0
            answer = self._socket.recv(MESSAGE_BYTES)
            kind, code = struct.unpack_from("=H", answer, 4)[0], -struct.unpack_from("=i", answer, 16)[0]
        if code:
            raise OSError(code, os.strerror(code))

    def _send(self, kind: int, flags: int, attributes: bytes) -> None:
        body = struct.pack("!BBH", socket.AF_UNSPEC, 0, self._number) + attributes
        self._socket.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body)


def _socket_in(namespace: Path) -> socket.socket:
    """A socket stays in the network namespace in which it was made. A thread of its own goes there, and ends."""

    def make() -> socket.socket:
        libc = ctypes.CDLL(None, use_errno=True)
        with namespace.open("rb") as entry:
            if libc.setns(entry.fileno(), CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)

    with ThreadPoolExecutor(max_workers=1) as there:
        return there.submit(make).result()


def _attribute(kind: int, content: bytes) -> bytes:
    padding = -len(content) % 4
    return struct.pack("=HH", 4 + len(content), kind) + content + b"\0" * padding


def _packet_number(message: bytes) -> int:
    """From the attribute with the packet's header, wherever it is. Raises ValueError."""
    offset = HEADER_BYTES
    while offset + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, offset)
        if kind & 0x3FFF == PACKET_HEADER:
            return int(struct.unpack_from("!I", message, offset + 4)[0])
        offset += max(4, size + -size % 4)
    raise ValueError("a packet without a number")
