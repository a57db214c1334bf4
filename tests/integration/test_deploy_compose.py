"""docker-compose.yml and the scripts of its image, as far as they can be checked without a container engine.
`make test-compose` runs the file on a real one."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "container"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
LASTING = {name: service for name, service in SERVICES.items() if name != "secrets"}
TOKEN = "a-token-of-24-characters"


def make_secrets(folder: Path) -> dict[str, str]:
    for volume in ("cluster", "services", "database", "redis", "grafana"):
        (folder / volume).mkdir(exist_ok=True)
    subprocess.run([SCRIPTS / "make-secrets", folder], check=True, timeout=60)
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_secrets_are_made_once(tmp_path: Path) -> None:
    first = make_secrets(tmp_path)
    assert set(first) == {
        *("cluster/token", "services/database_url", "services/redis_url"),
        *("database/password", "redis/password", "redis/redis.conf", "grafana/password"),
    }
    own = ("cluster/token", "database/password", "redis/password", "grafana/password")
    assert len({first[name] for name in own}) == len(own), "nobody's password is another's"
    assert first["services/database_url"] == f"mysql://flyball:{first['database/password']}@database:3306/flyball"
    assert first["redis/redis.conf"] == f"requirepass {first['redis/password']}\n"
    assert make_secrets(tmp_path) == first
    # Cut off in the middle: an empty file is no secret, and what others know stays.
    (tmp_path / "cluster" / "token").chmod(0o644)
    (tmp_path / "cluster" / "token").write_text("")
    (tmp_path / "services" / "redis_url").unlink()
    again = make_secrets(tmp_path)
    assert len(again["cluster/token"]) == 48
    assert {name: text for name, text in again.items() if name != "cluster/token"} == {
        name: text for name, text in first.items() if name != "cluster/token"
    }


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_more_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"]
    assert service["restart"] == {"secrets": "no", "example": "on-failure"}.get(name, "unless-stopped")
    assert re.search(r":(local|v?\d+\.\d+\.\d+)$", service["image"]), "an exact version"
    assert not re.search(r"PASSWORD=|TOKEN=", str(service)), "secrets come from files"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", [name for name in LASTING if not name.startswith("chaos-")])
def test_health_is_asked_without_python(name: str) -> None:
    check = LASTING[name]["healthcheck"]
    assert "python" not in " ".join(check["test"])
    assert int(check["interval"].removesuffix("s")) >= 4


def test_who_waits_for_whom() -> None:
    assert SERVICES["secrets"]["build"]["dockerfile"] == "deploy/Dockerfile"
    for name, service in LASTING.items():
        for other, how in service.get("depends_on", {}).items():
            ends = other == "secrets"
            assert how == {"condition": "service_completed_successfully" if ends else "service_healthy"}, name
            assert ends or "healthcheck" in SERVICES[other]


def test_without_a_profile_no_fault_is_injected() -> None:
    injecting = {name for name, service in SERVICES.items() if "inject" in service.get("command", ())}
    assert injecting == {"chaos-host-a", "chaos-host-b", "chaos-spare"}
    for name in injecting:
        host = name.removeprefix("chaos-")
        service = SERVICES[name]
        assert (service["profiles"], service["pid"]) == (["chaos"], f"service:{host}")
        assert service["command"][:5] == ["flyball", "inject", "chaos", "--host", host]
        assert f"{host}:/var/lib/flyball" in service["volumes"]


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
        self.send_response(200 if allowed and self.path == "/v1/jobs/one" else 404)
        self.end_headers()
        self.wfile.write(b'{"job":"one","state":"running"}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("/v1/jobs/one",), 0),
        (("/v1/jobs/one", '"state":"running"'), 0),
        (("/v1/jobs/one", '"state":"failed"'), 1),
        (("/v1/jobs/two",), 1),
    ],
)
def test_a_container_is_healthy_if_the_service_says_so(
    api: str, tmp_path: Path, arguments: tuple[str, ...], expected: int
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    env = os.environ | {"FLYBALL_TOKEN_FILE": str(tmp_path / "token")}
    words = [SCRIPTS / "healthy", api, *arguments]
    assert subprocess.run(words, env=env, timeout=60, check=False).returncode == expected
    nobody = [SCRIPTS / "healthy", "127.0.0.1:1", *arguments]
    assert subprocess.run(nobody, env=env, timeout=60, check=False, stderr=subprocess.DEVNULL).returncode == 1
