"""A try of RDMA on this host alone: register shared memory, and write it from one queue pair to another of the same
port, as slots are written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final, Self

from ckpt_engine.peers.transport.rdma.completion_errors import QueuePairError
from ckpt_engine.peers.transport.rdma.device import OpenDevice
from ckpt_engine.peers.transport.rdma.queue_pair import QueuePair
from ckpt_engine.peers.transport.rdma.registrations import register
from ckpt_engine.peers.transport.rdma.verbs import RdmaPort
from ckpt_engine.peers.transport.rdma.verbs_errors import unavailable
from flyball.contracts.errors import Unreachable

_PAUSE_S: Final = 0.001


class LoopbackTry:
    """An opened port with registered memory. For one thread; a context manager."""

    def __init__(self, port: RdmaPort, *, size_bytes: int) -> None:
        """Registers twice `size_bytes`. Raises RdmaUnavailable: NO_PYVERBS, NO_ACCESS, NO_DEVICE, MEMLOCK."""
        self._port, self._size_bytes = port, size_bytes
        self._file = os.memfd_create("flyball-rdma-try", os.MFD_CLOEXEC)
        with ExitStack() as undo, self._failing():
            undo.callback(os.close, self._file)
            os.ftruncate(self._file, 2 * size_bytes)
            self._device = OpenDevice(port)
            undo.callback(self._device.close)
            self._memory = register(self._device.domain, self._file, 2 * size_bytes)
            undo.callback(self._memory.close)
            self._closers = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Deregister the memory and close the device."""
        self._closers.close()

    def write(self, *, timeout_s: float) -> None:
        """Write the first half of the memory into its second half, through the device, and compare them.

        Raises Unreachable if the bytes do not arrive in time, or do not arrive as they were sent; RdmaUnavailable if
        the device makes no queue pairs.
        """
        os.pwrite(self._file, os.urandom(self._size_bytes) + bytes(self._size_bytes), 0)
        due_s = time.monotonic() + timeout_s
        with ExitStack() as pairs:
            with self._failing():
                source = QueuePair(self._device, self._port)
                pairs.callback(source.close)
                target = QueuePair(self._device, self._port)
                pairs.callback(target.close)
            try:
                self._write(source, target, due_s)
            except QueuePairError as error:
                raise self._broken(error.message) from error
            except TimeoutError:
                raise self._broken(f"nothing moved for {timeout_s:g} s") from None
        if os.pread(self._file, self._size_bytes, 0) != os.pread(self._file, self._size_bytes, self._size_bytes):
            raise self._broken("other bytes arrived than were sent")

    def _write(self, source: QueuePair, target: QueuePair, due_s: float) -> None:
        source.connect(target.endpoint)
        target.connect(source.endpoint)
        key = target.grant(self._memory, self._size_bytes, self._size_bytes, write=True)
        _settle(target, due_s)
        local = self._memory.local(0, self._size_bytes)
        source.write(local, (self._memory.address + self._size_bytes, key), lambda: None)
        _settle(source, due_s)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What fails here is what keeps the engine from RDMA."""
        try:
            yield
        except QueuePairError as error:
            needed_bytes = 2 * self._size_bytes
            raise unavailable(self._port.device, error, needed_bytes=needed_bytes) from error

    def _broken(self, reason: str) -> Unreachable:
        gid = self._port.gid
        where = f"GID {gid.index} ({gid.text})" if gid else "its GID"
        return Unreachable(
            f"A test WRITE from {self._port.name} to itself failed: {reason}.",
            hint=f"check that the address of {where} is still one of this host "
            f"(ip addr), and what `dmesg` says about {self._port.device}",
        )


def _settle(pair: QueuePair, due_s: float) -> None:
    """Wait until all that was posted is done. Raises TimeoutError, QueuePairError."""
    while pair.posted:
        if time.monotonic() > due_s:
            raise TimeoutError
        pair.poll()
        time.sleep(_PAUSE_S)
