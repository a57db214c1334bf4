"""A way to a server that can be cut while all processes go on."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from support.servers.own_servers import free_port


class Forwarder:
    """A TCP port in front of another one of this machine: a network between a daemon and the supervisor that can be cut
    while all processes go on."""

    def __init__(self, url: str) -> None:
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self.heal()

    def heal(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        with self._lock:
            self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """End what goes through it, and let nothing new through."""
        with self._lock:
            ended = [*self._open, *([self._listener] if self._listener else [])]
            self._listener = None
            self._open.clear()
        for sock in ended:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # cut
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # it is busy: the daemon tries again
                    near.close()
                    continue
                with self._lock:
                    self._open |= {near, far}
                    is_cut = self._listener is not listener
                if is_cut:
                    self.cut_off(near, far)
                    return
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        self.cut_off(source, sink)

    def cut_off(self, *pair: socket.socket) -> None:
        """End one connection."""
        with self._lock:
            self._open -= set(pair)
        for sock in pair:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
