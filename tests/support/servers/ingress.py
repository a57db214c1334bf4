"""What stands before the parts of a control plane: one address."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PASSED_ON = ("Authorization", "Content-Type", "Retry-After")
TIMEOUT_S = 60.0  # longer than a long poll


class Ingress:
    """What stands before the parts in a cluster: sends each request to the part that serves its path. When that part is
    away or dies while it answers, the connection ends without an answer, as the part's own would."""

    def __init__(self, port_of: Callable[[str], int]) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {k: v for k, v in self.headers.items() if k in PASSED_ON}
                with closing(http.client.HTTPConnection("127.0.0.1", port_of(part_of(self.path)), TIMEOUT_S)) as part:
                    try:
                        part.request(self.command, self.path, body, headers)
                        answer = part.getresponse()
                        content = answer.read()
                    except (OSError, http.client.HTTPException):
                        self.close_connection = True
                        return
                self.send_response(answer.status)
                for name in PASSED_ON[1:]:
                    if value := answer.getheader(name):
                        self.send_header(name, value)
                if answer.status != 204:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                return  # who asked has gone

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def part_of(path: str) -> str:
    if path.startswith("/v1/reports"):
        return "sensor"
    return "actuator" if path.startswith("/v1/hosts/") else "api"
