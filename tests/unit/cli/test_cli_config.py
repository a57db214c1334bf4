"""`flyball config show`: where each setting comes from; and the lines of an event stream."""

from __future__ import annotations

import json
from pathlib import Path

from support.commands.here import run_here

from flyball.cli.look.watch import text_of
from flyball.cli.reach.event_stream import parse


def test_each_setting_names_its_source_and_secrets_stay_hidden(tmp_path: Path) -> None:
    file, token = tmp_path / "ckpt.toml", tmp_path / "token"
    file.write_text("[engine]\nping_interval_s = 0.25\n[checkpoint]\nevery_steps = 4\n")
    token.write_text("a-secret-of-the-cluster")
    environment = {
        **{"FLYBALL_STATE_DIR": str(tmp_path), "FLYBALL_PORT": "8080", "FLYBALL_TOKEN_FILE": str(token)},
        **{"FLYBALL_POLICY__ROOT_CAUSE_WINDOW_S": "1.5", "FLYBALL_CKPT_EVERY_STEPS": "8"},
        **{"FLYBALL_DATABASE_URL": "mysql://flyball:hunter2@db/flyball"},
    }
    words = ("config", "show", "--ckpt-config", str(file), "--supervisor", "http://10.0.0.1:7370", "-o", "json")
    done = run_here(*words, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "hunter2" not in done.stdout and "a-secret" not in done.stdout
    found = {(one["section"], one["name"]): (one["value"], one["source"]) for one in json.loads(done.stdout)}
    assert found["command", "supervisor"] == ("http://10.0.0.1:7370", "--supervisor")
    assert found["command", "token_file"] == (str(token), "FLYBALL_TOKEN_FILE")
    assert found["supervisor", "port"] == (8080, "FLYBALL_PORT")
    assert found["supervisor", "token"] == ("(set, not shown)", str(token))
    assert found["supervisor", "host"] == ("127.0.0.1", "default")
    assert found["supervisor", "database_url"] == ("mysql://flyball:***@db/flyball", "FLYBALL_DATABASE_URL")
    assert found["policy", "root_cause_window_s"] == (1.5, "FLYBALL_POLICY__ROOT_CAUSE_WINDOW_S")
    assert found["engine", "ping_interval_s"] == (0.25, f"{file}, [engine]")
    assert found["checkpoint", "every_steps"] == (8, "FLYBALL_CKPT_EVERY_STEPS")


def test_a_stream_is_parsed_and_what_is_cut_off_is_left_out() -> None:
    lines = [
        "retry: 1000",
        "",
        ": alive",
        "",
        "id: 7",
        "event: decision",
        'data: {"kind":"decision"}',
        "",
        "id: 8",
        "data: {",
    ]
    assert [tuple(found) for found in parse(lines)] == [(7, {"kind": "decision"})]


def test_events_are_told_in_a_line() -> None:
    opened = {"kind": "incident_opened", "incident_id": "inc-4", "host_id": "host-b", "data": {"cause": "host_silent"}}
    assert text_of(opened, "No report.") == "inc-4 opened, host_silent on host-b: No report."
    closed = {"kind": "incident_closed", "incident_id": "inc-4", "data": {"state": "resolved", "lost_steps": 0}}
    assert text_of(closed, "") == "inc-4 resolved, 0 steps lost"
    assert text_of({"kind": "host_joined", "host_id": "host-c"}, "") == "host host-c joined"
