from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flyball.cli.reach.places import (
    find_supervisor,
    keep_token,
    make_state_dir,
    state_root,
    supervisor_dir,
)
from flyball.contracts.errors import ConfigurationError, NotFound, Unauthorized, UsageError


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
