"""An opened RDMA device: its protection domain, and the slots registered with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from ckpt_engine.peers.transport.rdma.completion_errors import DeviceLost, DeviceRefused, QueuePairError
from ckpt_engine.peers.transport.rdma.registrations import Registrations
from ckpt_engine.peers.transport.rdma.verbs import (
    RdmaPort,
    RdmaUnavailable,
    load_pyverbs,
    open_device,
    path_mtu_bytes,
)
from ckpt_engine.peers.transport.rdma.verbs_errors import verbs_errors

_MOST_READS: Final = 16  # at a time, of each queue pair

# pyverbs does not say which descriptor a new completion channel has, so none is opened or closed meanwhile. The garbage
# collector may still close one, and its descriptor becomes the new channel's. It is not new then: another is opened.
_event_descriptors = threading.Lock()
_CHANNEL_ATTEMPTS: Final = 4


class OpenDevice:
    """Stays open until `close` was called and its last user has left. Thread-safe."""

    def __init__(self, port: RdmaPort, *, on_memlock: Callable[[RdmaUnavailable], None] = lambda refusal: None) -> None:
        """`on_memlock` is called when a slot cannot be registered for lack of lockable memory. Raises RdmaUnavailable,
        DeviceLost, DeviceRefused."""
        verbs = load_pyverbs()
        self.name = port.device
        with _event_descriptors:
            self.context = open_device(port)
        try:
            with verbs_errors():
                attributes = self.context.query_device()
                self.domain = verbs.pd.PD(self.context)
        except BaseException:
            self.context.close()
            raise
        flags = int(attributes.device_cap_flags)
        enums = verbs.enums
        self.has_windows = bool(flags & int(enums.IBV_DEVICE_MEM_WINDOW_TYPE_2A | enums.IBV_DEVICE_MEM_WINDOW_TYPE_2B))
        self.reads_answered = min(_MOST_READS, int(attributes.max_qp_rd_atom))
        self.reads_posted = min(_MOST_READS, int(attributes.max_qp_init_rd_atom))
        self.registrations = Registrations(self.domain, on_memlock=on_memlock)
        self._users = 0
        self._closing = False
        self._ended = False
        self._lock = threading.Lock()

    @property
    def is_closing(self) -> bool:
        """Whether it is given up: who uses it ends what is in progress, and begins nothing new."""
        return self._closing

    @property
    def has_ended(self) -> bool:
        """Whether it is closed."""
        return self._ended

    def mtu_bytes(self, port_number: int) -> int:
        with verbs_errors():
            return path_mtu_bytes(self.context, port_number)

    def enter(self) -> None:
        with self._lock:
            if self._closing:
                raise DeviceLost(f"the RDMA device {self.name} was closed", hint=DeviceLost.next_step)
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and self._users == 0
        if last:
            self._end()

    def close(self) -> None:
        with self._lock:
            idle = not self._closing and self._users == 0
            self._closing = True
        self.registrations.retire()
        if idle:
            self._end()

    def _end(self) -> None:
        self.registrations.close()
        for ended in (self.domain, self.context):
            with suppress(QueuePairError), _event_descriptors, verbs_errors():  # the device may be gone
                ended.close()
        self._ended = True

    def open_channel(self) -> tuple[Any, int]:
        """A completion channel, and its descriptor: pyverbs can only wait on it with the GIL held."""
        nameless: list[Any] = []  # kept open for now, so that the next one gets another descriptor
        with _event_descriptors, verbs_errors():
            try:
                for _ in range(_CHANNEL_ATTEMPTS):
                    before = _channels()
                    channel = load_pyverbs().cq.CompChannel(self.context)
                    found = _channels() - before
                    if len(found) == 1:
                        return channel, found.pop()
                    nameless.append(channel)
            finally:
                for channel in nameless:
                    channel.close()
        raise DeviceRefused(  # /proc is not mounted, or hides this process from itself
            f"the descriptor of a new completion channel was not found in /proc/self/fd: {len(found)} are new",
            hint="mount /proc as usual",
        )

    def close_channel(self, channel: Any) -> None:  # noqa: ANN401 - of open_channel
        with _event_descriptors, verbs_errors():
            channel.close()


def _channels() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib would build a path for each
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":  # noqa: PTH115
                found.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return found
