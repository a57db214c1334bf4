"""`flyball goodput` with a live supervisor, and with a growing log."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update
from support.jobs.goodput_runs import interrupted_run
from support.servers.here import client_of, supervisor_in

from flyball.cli.main import run_cli
from flyball.contracts.cluster import JobSpec
from flyball.contracts.events import Event
from flyball.contracts.wire import encode
from goodput.account.options import AccountOptions
from goodput.calculator import calculate
from goodput.read.event_files import write_events
from goodput.show.report import to_json
from services.main import Supervisor
from services.store.sql import tables
from services.store.sql.database import Database
from services.store.sql.events import SqlEventLog

DEADLINE_S = 300.0
EVENTS = interrupted_run(job="llama")


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """Has two jobs with the events of long runs in its database."""
    state_dir = tmp_path_factory.mktemp("supervisor") / "state"
    with supervisor_in(state_dir) as supervisor:
        with client_of(supervisor) as client:
            for job in ("llama", "other"):
                spec = JobSpec(job=job, argv=("train.py",), workdir="/tmp")
                assert client.post("/v1/jobs", content=encode(spec)).is_success
        db = Database(f"sqlite:///{state_dir}/flyball.sqlite")
        log = SqlEventLog(db)
        db.transact(lambda connection: connection.execute(delete(tables.events)))  # they were submitted long ago
        log.append(EVENTS)
        span = {"submitted_at": EVENTS[0].at, "ended_at": EVENTS[-1].at}
        db.transact(
            lambda connection: connection.execute(update(tables.jobs).where(tables.jobs.c.job == "llama").values(span))
        )
        log.append(interrupted_run(job="other", seed=5, save_every=20, start=EVENTS[-1].at + 1e6))  # faults have no job
        db.close()
        yield supervisor


@pytest.fixture
def at_supervisor(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLYBALL_SUPERVISOR", supervisor.url)
    monkeypatch.setenv("FLYBALL_TOKEN", supervisor.token)
    monkeypatch.chdir(tmp_path)


def output_of(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_cli(["goodput", *line.split()]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.usefixtures("at_supervisor")
def test_the_whole_report_comes_from_a_live_supervisor(capsys: pytest.CaptureFixture[str]) -> None:
    start, end = EVENTS[0].at, EVENTS[-1].at
    found = json.loads(
        output_of(
            f"--job llama --from {start + 1800.0} --to {end - 60.0} --gpu-hour-price 2.5 --window 10m -o json", capsys
        )
    )
    options = AccountOptions(gpu_hour_price=2.5, window_s=600.0, from_at=start + 1800.0, to_at=end - 60.0)
    expected = to_json(calculate(EVENTS, options=options))
    # The job submitted over HTTP has its own events, from the time of this test.
    assert found["seconds_by_category"] == expected["seconds_by_category"]
    assert (found["cost"], found["losses"], found["rolling"]) == (
        expected["cost"],
        expected["losses"],
        expected["rolling"],
    )
    assert len(found["incidents"]) == len(expected["incidents"])


@pytest.mark.usefixtures("at_supervisor")
def test_every_other_command_takes_a_job_of_the_supervisor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert output_of("report --job llama --to +3h --out llama.html", capsys) == ""
    page = (tmp_path / "llama.html").read_text()
    assert "Goodput of llama" in page and ">The run<" in page
    assert '"recommendation"' in output_of("--job llama -o json", capsys)
    assert 'flyball_goodput_interruptions{training_job="other"} 6.0' in output_of(
        "export --prometheus --job other", capsys
    )
    assert "best interval" in output_of("predict --job llama", capsys)
    compared = json.loads(output_of("compare llama other -o json", capsys))
    assert compared["b"]["report"]["job"] == "other"
    write_events(tmp_path / "a.jsonl", EVENTS)
    assert "A: llama (a.jsonl)" in output_of("compare a.jsonl other", capsys)


@pytest.mark.usefixtures("at_supervisor")
def test_one_of_several_jobs_must_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["goodput"]) == 2
    assert "--job NAME" in capsys.readouterr().err
    assert run_cli(["goodput", "compare", "llama", "none"]) == 8
    assert run_cli(["goodput", "--job", "llama", "--from", "99999999999999"]) != 0
    assert "Next step: " in capsys.readouterr().err


@pytest.mark.usefixtures("at_supervisor")
def test_every_documented_command_runs_on_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    write_events("before.jsonl", EVENTS)
    page = (Path(__file__).parents[3] / "docs" / "reference" / "goodput" / "commands.md").read_text()
    lines = [line.strip() for line in page.splitlines() if line.startswith("    flyball goodput ") and "llama" in line]
    assert len(lines) >= 3
    for line in lines:
        output_of(line.removeprefix("flyball goodput "), capsys)


# --- watching --------------------------------------------------------------------------------------------------------


def start_watch(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401 - Popen's own
    command = [sys.executable, "-m", "flyball.cli.main", "goodput", "watch", *arguments]
    return subprocess.Popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options)


def grow(path: Path, events: list[Event]) -> None:
    write_events(path, events)


def test_a_growing_log_is_followed_until_the_job_ends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    half = len(EVENTS) // 2
    grow(path, EVENTS[:half])
    watch = start_watch(str(path), "--every", "0.1s", "-o", "json")
    try:
        assert watch.stdout is not None
        first = json.loads(watch.stdout.readline())
        assert first["outcome"] == "" and first["goodput"] == calculate(EVENTS[:half]).goodput
        grow(path, EVENTS[half:])
        rest, _ = watch.communicate(timeout=DEADLINE_S)
    finally:
        watch.kill()
    assert json.loads(rest.splitlines()[-1]) == to_json(calculate(EVENTS))
    assert watch.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_ctrl_c_leaves_watch(number: int, code: int, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    grow(path, EVENTS[:-1])
    watch = start_watch(str(path))
    try:
        assert watch.stdout is not None
        assert b"llama: goodput" in watch.stdout.readline()
        watch.send_signal(number)
        _, errors = watch.communicate(timeout=DEADLINE_S)
    finally:
        watch.kill()
    assert (watch.returncode, errors) == (code, b"")


def test_on_a_terminal_it_shows_a_screen_and_restores_the_cursor(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    grow(path, EVENTS[:-1])
    ours, theirs = pty.openpty()
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "60"}
    watch = start_watch(str(path), "--every", "0.1s", stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    shown = b""
    try:
        while b"Press Ctrl-C to quit." not in shown:
            assert select.select([ours], [], [], DEADLINE_S)[0], shown
            shown += os.read(ours, 65536)
        grow(path, EVENTS[-1:])
        while chunk := read_terminal(ours):
            shown += chunk
        assert watch.wait(DEADLINE_S) == 0
    finally:
        watch.kill()
        os.close(ours)
    assert b"Where the time went" in shown
    assert b"succeeded" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is shown again"


def read_terminal(descriptor: int) -> bytes:
    """The terminal's next output; b"" once it is closed."""
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO: the other end was closed
        return b""


@pytest.mark.usefixtures("at_supervisor")
def test_a_supervisors_job_is_watched_until_it_ends() -> None:
    watch = start_watch("--job", "llama", "--every", "0.1s")
    try:
        shown, errors = watch.communicate(timeout=DEADLINE_S)
    finally:
        watch.kill()
    assert b"llama: goodput" in shown and b"(succeeded)" in shown
    assert (watch.returncode, errors) == (0, b"")
