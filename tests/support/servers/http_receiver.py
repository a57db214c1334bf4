"""An HTTP server that keeps what it is sent, as the receiver of a webhook or of traces."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DEADLINE_S = 60.0


class Receiver:
    """Answers with the given status codes, then with 204."""

    def __init__(self, *statuses: int) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []  # path, headers, body
        self.changed = threading.Condition()
        waiting = list(statuses)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with receiver.changed:
                    receiver.requests.append((self.path, dict(self.headers.items()), body))
                    receiver.changed.notify_all()
                self.send_response(waiting.pop(0) if waiting else 204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join(DEADLINE_S)
        self.server.server_close()

    def received(self, count: int) -> list[bytes]:
        """The bodies of the requests, once there are so many."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) >= count, DEADLINE_S), "too few requests"
            return [body for _, _, body in self.requests]
