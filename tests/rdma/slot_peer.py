"""The other side of a slot's transfer: `python -m tests.rdma.slot_peer SIZE`, on any host.

It prints its port, and serves one connection after the other. Asked by a Ping, it takes a slot in by WRITE and replies
with its digest. Asked to list shards, it gives the slot back by READ.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from ckpt_engine.contracts.peer_wire import ListShards, PeerRequest, Reply, ShardVerdict
from ckpt_engine.peers.transport.port import Connection, Listener
from ckpt_engine.settings import load_settings
from flyball.contracts.errors import FlyballError
from tests.rdma.other_host import own_address
from tests.rdma.rdma_transport import RdmaListener

PATIENT = msgspec.structs.replace(load_settings(os.environ), io_timeout_s=300)  # a busy host emulates a MiB/s or two
CHUNK_BYTES = 1 << 20
PIECE_BYTES = 4 << 20
LIST = ListShards("job", 0)


class Slot:
    """A file in shared memory, and a mapping of it."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.path = Path(f"/dev/shm/rdma-test-{os.getpid()}-{name}")
        self.size_bytes = size_bytes
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.descriptor, size_bytes)
        os.posix_fallocate(self.descriptor, 0, size_bytes)
        self.memory = mmap.mmap(self.descriptor, size_bytes)

    def fill(self) -> str:
        """With bytes that differ in each MiB; returns their digest."""
        block = os.urandom(CHUNK_BYTES)
        for start in range(0, self.size_bytes, len(block)):
            self.memory[start : start + len(block)] = (start.to_bytes(8, "little") + block[8:])[
                : self.size_bytes - start
            ]
        return self.digest()

    def clear(self) -> None:
        for start in range(0, self.size_bytes, CHUNK_BYTES):
            self.memory[start : start + CHUNK_BYTES] = bytes(min(CHUNK_BYTES, self.size_bytes - start))

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(memoryview(self.memory))

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)
        with suppress(BufferError):  # a failed test still looks at it
            self.memory.close()


def take(connection: Connection, slot: Slot) -> None:
    """As a receiver of a replica does."""
    whole = memoryview(slot.memory)
    with connection.expect(slot.descriptor, [(0, slot.size_bytes)]):
        connection.send(Reply(ShardVerdict.SEND), timeout_s=60)
        for start in range(0, slot.size_bytes, CHUNK_BYTES):
            connection.receive_raw(whole[start : start + CHUNK_BYTES])


def give(connection: Connection, slot: Slot) -> None:
    """As any sender does."""
    for start in range(0, slot.size_bytes, PIECE_BYTES):
        connection.send_file(slot.descriptor, start, min(PIECE_BYTES, slot.size_bytes - start))


def restore(connection: Connection, slot: Slot) -> None:
    """As whoever fetches a shard does."""
    whole = memoryview(slot.memory)
    with connection.land_in(slot.descriptor):
        for start in range(0, slot.size_bytes, CHUNK_BYTES):
            connection.receive_raw(whole[start : start + CHUNK_BYTES])


def main() -> None:
    serve(RdmaListener(own_address(), 0, fallback=False, settings=PATIENT), int(sys.argv[1]))


def serve(listener: Listener, size_bytes: int, *, digests: bool = True) -> None:
    """Until the process is killed. Without `digests` the replies have none: they take time, too."""
    for left in Path("/dev/shm").glob("rdma-test-*-peer"):  # of killed ones
        if not Path(f"/proc/{left.name.split('-')[2]}").exists():
            left.unlink()
    slot = Slot("peer", size_bytes)
    print(f"port {listener.port}", flush=True)
    while True:
        connection, _ = listener.accept()
        try:
            with connection:
                while True:
                    _answer(connection, slot, digests=digests)
        except FlyballError as error:
            print(f"ended {type(error).__name__} {error.message}", flush=True)


def _answer(connection: Connection, slot: Slot, *, digests: bool) -> None:
    request: PeerRequest = connection.receive(PeerRequest, timeout_s=600)  # type: ignore[arg-type]
    if request == LIST:
        print("giving", flush=True)
        give(connection, slot)
    else:
        take(connection, slot)
        connection.send(Reply(ShardVerdict.OK, slot.digest() if digests else ""), timeout_s=60)


if __name__ == "__main__":
    main()
