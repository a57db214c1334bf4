"""How a trainer has its captured shards committed: by telling the engine, without ever waiting for it."""

from __future__ import annotations

import contextlib
import socket
from typing import Protocol

from ckpt_engine.contracts.notices import MAX_MESSAGE_CHARS, Captured, Notice, SaveAborted, SaveWaited
from ckpt_engine.slots.rank_segments import SlotView
from flyball.contracts import wire
from flyball.sdk.worker_identity import WorkerIdentity


class CommitLink(Protocol):
    """Whoever commits what a trainer captured: the engine, or the trainer itself."""

    def captured(self, view: SlotView) -> None:
        """A slot is whole."""
        ...

    def aborted(self, step: int, message: str) -> None:
        """This rank will never have `step`."""
        ...

    def waited(self, step: int, waited_s: float) -> None:
        """Training waited for this step's save."""
        ...

    def refresh(self) -> None:
        """Bring the world words up to date, if it is this side that writes them."""
        ...

    @property
    def alive(self) -> bool:
        """Whether anyone is there to commit."""
        ...

    def close(self) -> None: ...


class EngineLink:
    """Datagrams to the engine's notify socket. Nothing here blocks or raises: a notice is a hint (the engine also looks
    by itself), and one that cannot be sent is dropped."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._socket = _datagram_socket()

    def captured(self, view: SlotView) -> None:
        me = self._identity
        self._send(Captured(job=me.job, rank=me.rank, generation=view.generation, step=view.step, slot=view.index))

    def aborted(self, step: int, message: str) -> None:
        me = self._identity
        reason = message[:MAX_MESSAGE_CHARS]
        self._send(SaveAborted(job=me.job, rank=me.rank, generation=me.generation, step=step, message=reason))

    def waited(self, step: int, waited_s: float) -> None:
        me = self._identity
        self._send(SaveWaited(job=me.job, rank=me.rank, generation=me.generation, step=step, waited_s=waited_s))

    def refresh(self) -> None:
        """The engine writes the world words."""

    @property
    def alive(self) -> bool:
        """Whether a process has the socket open: the kernel refuses to connect to one that nobody holds."""
        try:
            with _datagram_socket() as probe:
                probe.connect(self._identity.engine_notify)
        except OSError:  # also when this process has no descriptor left to ask with
            return False
        return True

    def close(self) -> None:
        self._socket.close()

    def _send(self, notice: Notice) -> None:
        with contextlib.suppress(OSError):  # nobody there, or its queue is full
            self._socket.sendto(wire.encode(notice), self._identity.engine_notify)


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made
