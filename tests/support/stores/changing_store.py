"""An HTTP proxy in front of an object store that changes what goes through it, and lets both sides believe that all is
well: as a bad network card, a caching proxy, or a gateway with a bug does."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Change = Callable[[str, bytes], bytes]  # (path, body) -> the body that goes on


def as_it_is(_path: str, body: bytes) -> bytes:
    return body


class ChangingStore:
    """Set `upload` and `download` at any time. `hides_tags`: entity tags say nothing about the content, as with keys of
    the user's own."""

    def __init__(self, endpoint: str) -> None:
        self.upload: Change = as_it_is
        self.download: Change = as_it_is
        self.hides_tags = False
        self.seen: list[tuple[str, str, dict[str, str]]] = []  # (method, path, headers)
        target = endpoint.removeprefix("http://")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.seen.append((self.command, self.path, dict(self.headers)))
                if self.command == "PUT":
                    body = proxy.upload(self.path, body)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "content-length"}
                there = http.client.HTTPConnection(target, timeout=60.0)
                there.request(self.command, self.path, body, headers | {"Connection": "close"})
                answer = there.getresponse()
                content = answer.read()
                there.close()
                if self.command == "GET" and answer.status in (200, 206):
                    content = proxy.download(self.path, content)
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() == "etag" and proxy.hides_tags and "partNumber=" not in self.path:
                        value = '"of-an-encrypted-object"'  # noqa: PLW2901
                    if name.lower() not in ("content-length", "connection", "server", "date", "transfer-encoding"):
                        self.send_header(name, value)
                size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", size or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def flip(at: int) -> Callable[[bytes], bytes]:
    """Flip a bit of this byte; negative: from the end."""

    def changed(body: bytes) -> bytes:
        found = bytearray(body)
        found[at] ^= 4
        return bytes(found)

    return changed


def only(name: str, change: Callable[[bytes], bytes], *, part: int | None = None) -> Change:
    """Change the bodies of this name only, of an upload in parts this part only."""

    def changed(path: str, body: bytes) -> bytes:
        is_part = part is None or f"partNumber={part}" in path
        return change(body) if name in path and body and is_part else body

    return changed
