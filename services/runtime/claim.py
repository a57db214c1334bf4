"""A supervisor's folder and its listening socket, taken before the rest of it exists.

Light to import. Whoever holds a claim can tell hosts the address at once: what they send waits in the socket's backlog
until the server takes it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from services.runtime.http.listener import bind_listener
from services.runtime.state_dir import SupervisorStateDir

PARTS = ("sensor", "controller", "actuator", "api")


class Claim:
    """Nobody else can have this folder, or this address, until `close`."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str,
        port: int,
        parts: Iterable[str] = PARTS,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: the socket, if it is bound already. Raises PortInUse, ConfigurationError, StateVersionMismatch or
        StorageFull; then nothing is held."""
        self.state_dir = SupervisorStateDir(folder)
        with ExitStack() as undo:
            if listener is not None:
                undo.callback(listener.close)
            self.state_dir.open(sorted(parts))
            undo.callback(self.state_dir.close)
            self.listener = listener or bind_listener(host, port)
            undo.pop_all()

    def close(self) -> None:
        self.listener.close()
        self.state_dir.close()
