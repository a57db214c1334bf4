from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from flyball.cli.reach.client import ApiClient
from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import Conflict, FlyballError, Forbidden, NotFound, TooBusy, Unauthorized, Unreachable


class Handler(BaseHTTPRequestHandler):
    """Answers according to its path."""

    busy_left = 0  # of the requests to /for-a-while

    def do_GET(self) -> None:
        if self.path == "/for-a-while" and Handler.busy_left > 0:
            Handler.busy_left -= 1
            self.path = "/busy"
        answers = {
            "/ok": (200, {"items": [1, 2], "path": self.path}),
            "/for-a-while": (200, {}),
            "/missing": (404, {"detail": "No job x.", "code": "not_found", "hint": "look"}),
            "/conflict": (409, {"detail": "Another.", "code": "conflict", "hint": "rename"}),
            "/busy": (429, {"detail": "Full.", "code": "too_busy", "hint": "wait"}),
            "/odd": (500, {"detail": "Odd.", "code": "no-such-code"}),
            "/token": (401, {"detail": "No.", "code": "unauthorized"}),
            "/role": (403, {"detail": "This needs the operator's token.", "code": "forbidden"}),
        }
        if self.path.startswith("/pages"):
            query = parse_qs(urlsplit(self.path).query)
            end, limit = int(query.get("before", ["7"])[0]), int(query["limit"][0])
            numbers = list(range(max(0, end - limit), end))
            answers["/pages"] = (200, {"items": numbers, "next_before": numbers[0] if numbers[0] else None})
        status, body = answers.get(self.path.partition("?")[0], (502, None))
        data = b"<html>bad gateway</html>" if body is None else json.dumps(body).encode()
        self._answer(status, data)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        seen = {"token": self.headers["Authorization"], "body": json.loads(body) if body else None}
        self._answer(201, json.dumps(seen).encode())

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_answers_and_bodies(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ApiClient(url, "tok") as client:
        assert client.items("/ok", job=None, after=3) == [1, 2]
        assert client.get("/ok", job=None, after=3)["path"] == "/ok?after=3"
        posted = client.post("/any", JobSpec(job="j", argv=("t.py",), workdir="/"))
        assert client.newest("/pages", 3) == [4, 5, 6]
        monkeypatch.setattr("flyball.cli.reach.client.PAGE", 3)
        assert client.everything("/pages") == list(range(7))
        monkeypatch.setattr("flyball.cli.reach.client.PAGE", 2)
        assert client.newest("/pages", 5) == [2, 3, 4, 5, 6]
        assert client.newest("/pages", 100) == [0, 1, 2, 3, 4, 5, 6]
    assert posted["token"] == "Bearer tok"
    assert posted["body"]["argv"] == ["t.py"]


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("/missing", NotFound, "No job x."),
        ("/conflict", Conflict, "Another."),
        ("/busy", TooBusy, "Full."),
        ("/odd", FlyballError, "Odd."),
        ("/token", Unauthorized, "token"),
        ("/role", Forbidden, "operator"),
        ("/html", Unreachable, "not like a Flyball supervisor"),
    ],
)
def test_problems_become_errors(
    url: str, path: str, kind: type[FlyballError], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flyball.cli.reach.client.BUSY_TIMEOUT_S", 0.0)
    with ApiClient(url, "t") as client, pytest.raises(kind) as caught:
        client.get(path)
    assert expected in caught.value.message


def test_a_busy_supervisor_is_asked_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyball.http_errors.DEFAULT_RETRY_AFTER_S", 0.001)
    monkeypatch.setattr(Handler, "busy_left", 2)
    with ApiClient(url, "t") as client:
        assert client.get("/for-a-while") == {}
    assert Handler.busy_left == 0


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening, so connections are refused at once
        with (
            ApiClient(f"http://127.0.0.1:{taken.getsockname()[1]}", "t") as client,
            pytest.raises(Unreachable) as caught,
        ):
            client.get("/ok")
    assert "flyball up" in caught.value.hint
