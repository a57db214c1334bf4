from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flyball.cli.reach.places import (
    find_supervisor,
    host_elsewhere,
    keep_token,
    live_record,
    make_state_dir,
    state_root,
    supervisor_dir,
)
from flyball.contracts.errors import ConfigurationError, NotFound, Unauthorized, UsageError


class Supervisor:
    """Answers /healthz."""

    def __enter__(self) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"ok": true, "checks": {}}')

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def running(folder: Path, url: str = "http://127.0.0.1:1", pid: int | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "supervisor.json").write_text(json.dumps({"url": url, "pid": pid or os.getpid()}))
    (folder / "token").write_text("secret-of-" + folder.parent.name + "\n")
    return folder


def test_state_folders_follow_the_environment(tmp_path: Path) -> None:
    assert state_root({"FLYBALL_STATE_DIR": "/x"}) == Path("/x")
    assert supervisor_dir({"XDG_STATE_HOME": "/y"}) == Path("/y/flyball/supervisor")
    assert supervisor_dir({}) == Path.home() / ".local/state/flyball/supervisor"


def test_an_unusable_state_folder_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigurationError, match="Cannot use the state folder"):
        make_state_dir(file / "below")
    with pytest.raises(ConfigurationError, match="too long"):
        make_state_dir(tmp_path / ("x" * 100))


def test_the_named_supervisor_wins(tmp_path: Path) -> None:
    running(tmp_path / "jobs" / "j" / "supervisor")
    environ = {"FLYBALL_STATE_DIR": str(tmp_path), "FLYBALL_SUPERVISOR": "http://a:1", "FLYBALL_TOKEN": "t"}
    assert find_supervisor(environ).url == "http://a:1"
    named = find_supervisor(environ, url="http://b:2/")
    assert (named.url, named.token, named.token_file) == ("http://b:2", "t", None)
    several = find_supervisor(environ, url="http://b:2/, http://c:3")
    assert (several.url, several.urls) == ("http://b:2", "http://b:2,http://c:3")
    with pytest.raises(UsageError, match="c:3 is not a supervisor's address"):
        find_supervisor(environ, url="http://b:2,c:3")


def test_the_local_supervisor_is_found(tmp_path: Path) -> None:
    environ = {"FLYBALL_STATE_DIR": str(tmp_path)}
    with pytest.raises(NotFound, match="No supervisor runs"):
        find_supervisor(environ)
    folder = running(tmp_path / "jobs" / "j" / "supervisor", "http://127.0.0.1:7")
    found = find_supervisor(environ)
    assert (found.url, found.token, found.token_file) == ("http://127.0.0.1:7", "secret-of-j", folder / "token")
    running(tmp_path / "jobs" / "k" / "supervisor")
    with pytest.raises(UsageError, match="Several supervisors"):
        find_supervisor(environ)
    assert find_supervisor(environ, state_dir=str(tmp_path / "jobs" / "k")).token == "secret-of-k"


def test_a_record_whose_process_is_gone_does_not_count(tmp_path: Path) -> None:
    running(tmp_path / "jobs" / "j" / "supervisor", pid=2**22 - 1)
    (tmp_path / "jobs" / "k" / "supervisor").mkdir(parents=True)
    (tmp_path / "jobs" / "k" / "supervisor" / "supervisor.json").write_text("{")
    with pytest.raises(NotFound):
        find_supervisor({"FLYBALL_STATE_DIR": str(tmp_path)})


def test_the_secret_of_a_run_that_was_given_one_is_found(tmp_path: Path) -> None:
    folder = running(tmp_path / "jobs" / "j" / "supervisor")
    keep_token(folder / "token.given", "of-the-environment")
    assert find_supervisor({"FLYBALL_STATE_DIR": str(tmp_path)}).token == "of-the-environment"


def test_a_supervisor_of_another_machine_runs_as_long_as_it_writes(tmp_path: Path) -> None:
    """Its folder is shared; its process is not seen here, or is another one's. It is asked if it can be."""
    folder = running(tmp_path / "jobs" / "j" / "supervisor")
    there = {"url": "http://127.0.0.1:1", "pid": os.getpid(), "host": "another-machine"}
    (folder / "supervisor.json").write_text(json.dumps(there))
    (folder / "flyball.sqlite").touch()
    assert (live_record(folder), host_elsewhere(folder)) == (None, "another-machine")
    with pytest.raises(NotFound):  # and not this machine's, at that address
        find_supervisor({"FLYBALL_STATE_DIR": str(tmp_path)})
    with Supervisor() as url:
        (folder / "supervisor.json").write_text(json.dumps(there | {"elsewhere": url}))
        found = live_record(folder)
        assert found is not None and found.url == url
        os.utime(folder / "flyball.sqlite", (1.0, 1.0))
        assert live_record(folder) is None and not host_elsewhere(folder), "it was killed with its machine"


def test_without_a_token_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Unauthorized, match="No token"):
        find_supervisor({"FLYBALL_STATE_DIR": str(tmp_path)}, url="http://a:1")
    with pytest.raises(Unauthorized, match="missing-file"):
        find_supervisor({}, url="http://a:1", token_file=str(tmp_path / "missing-file"))
    with pytest.raises(UsageError, match="not a supervisor's address"):
        find_supervisor({}, url="a:1")


def test_only_the_owner_can_read_a_token(tmp_path: Path) -> None:
    file = tmp_path / "host" / "supervisor.token"
    file.parent.mkdir()
    file.touch(mode=0o644)
    assert keep_token(file, "secret").read_text() == "secret"
    assert file.stat().st_mode & 0o077 == 0
