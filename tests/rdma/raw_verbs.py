"""The least that RDMA needs, by pyverbs alone: one queue pair, one region of memory, WRITE and READ.

`python tests/rdma/raw_verbs.py SIZE` is the other side: it prints its port, keeps a region of SIZE bytes for one peer,
and prints what is in it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
import sys
import time
from pathlib import Path
from typing import IO, Any

import pyverbs.enums as e
import xxhash
from other_host import own_address
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

DEVICE = "rxe0"
ACK_TIMEOUT = 18  # 4.096 us * 2^18, 1.1 s: an emulated processor is late without a packet being lost
PART_BYTES = 4 << 20  # of one work request
DEADLINE_S = 120.0
LOCAL, REMOTE = e.IBV_ACCESS_LOCAL_WRITE, e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class Endpoint:
    """A queue pair and `size_bytes` of registered memory, `memory`."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = mmap.mmap(-1, size_bytes)
        self._context = Context(name=DEVICE)
        self._pd = PD(self._context)
        self._region = MR(self._pd, size_bytes, LOCAL | REMOTE, address=_address(self.memory))
        self._completions = CQ(self._context, 16)
        capacity = QPCap(max_send_wr=16, max_recv_wr=1)
        init = QPInitAttr(e.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=capacity)
        self._pair = QP(self._pd, init)
        self._gid_index = _ipv4_gid_index()

    def where(self) -> dict[str, Any]:
        """What the other side has to know."""
        return {
            "pair": self._pair.qp_num,
            "gid": str(self._context.query_gid(1, self._gid_index).gid),
            "address": self._region.buf,
            "key": self._region.rkey,
        }

    def connect(self, other: dict[str, Any]) -> None:
        self._other = other
        route = GlobalRoute(dgid=GID(other["gid"]), sgid_index=self._gid_index)
        path = AHAttr(gr=route, is_global=1, port_num=1)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = REMOTE
        attributes.dest_qp_num = other["pair"]
        attributes.path_mtu = self._context.query_port(1).active_mtu
        attributes.ah_attr = path
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = ACK_TIMEOUT, 6, 7
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 4
        attributes.min_rnr_timer = 12
        self._pair.to_rts(attributes)

    def transfer(self, opcode: int) -> float:
        """All of the memory, to or from the other side's; the seconds that it took."""
        started = time.monotonic()
        for offset in range(0, len(self.memory), PART_BYTES):
            size = min(PART_BYTES, len(self.memory) - offset)
            piece = SGE(self._region.buf + offset, size, self._region.lkey)
            request = SendWR(opcode=opcode, num_sge=1, sg=[piece], send_flags=e.IBV_SEND_SIGNALED)
            request.set_wr_rdma(self._other["key"], self._other["address"] + offset)
            self._pair.post_send(request)
            self._complete()
        return time.monotonic() - started

    def _complete(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            count, done = self._completions.poll(1)
            if count:
                assert done[0].status == e.IBV_WC_SUCCESS, f"work completion with status {done[0].status}"
                return
        raise TimeoutError("no work completion")

    def content(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.memory)

    def close(self) -> None:
        for thing in (self._pair, self._region, self._completions, self._pd, self._context):
            thing.close()


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _ipv4_gid_index() -> int:
    for path in Path(f"/sys/class/infiniband/{DEVICE}/ports/1/gids").iterdir():
        if path.read_text().startswith("0000:0000:0000:0000:0000:ffff:"):
            return int(path.name)
    raise LookupError(f"{DEVICE} has no GID of an IPv4 address")


def say(wire: IO[str], message: dict[str, Any]) -> None:
    wire.write(json.dumps(message) + "\n")
    wire.flush()


def hear(wire: IO[str]) -> dict[str, Any]:
    return dict(json.loads(wire.readline()))


def serve(size_bytes: int) -> None:
    endpoint = Endpoint(size_bytes)
    with socket.create_server((own_address(), 0)) as listener:
        listener.settimeout(DEADLINE_S)
        print(f"port {listener.getsockname()[1]}", flush=True)
        connection, _ = listener.accept()
    with connection, connection.makefile("rw") as wire:
        endpoint.connect(hear(wire))
        say(wire, endpoint.where())
        while line := wire.readline():
            request = json.loads(line)
            if fill := request.get("fill"):
                endpoint.memory[:] = bytes([fill]) * size_bytes
            say(wire, {"content": endpoint.content()})
    endpoint.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
