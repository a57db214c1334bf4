"""Wrong input at the command line: cause and next step on stderr, a documented exit code, no traceback."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands.here import run_here

from flyball.cli.main import run_cli
from flyball.cli.show.output import announce, print_error, print_fields, print_table
from flyball.contracts import errors
from flyball.contracts.errors import FlyballError, NotFound

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"


def environment(tmp_path: Path, **environ: str) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "CKPT_ENGINE_"))}
    return base | {"FLYBALL_STATE_DIR": str(tmp_path / "state")} | environ


def flyball(*arguments: str, tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    with contextlib.chdir(tmp_path):
        return run_here(*arguments, environment=environment(tmp_path, **environ))


def process(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flyball.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment(tmp_path),
    )


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        ("run", 2, "No script"),
        ("run missing.py", 2, "missing.py does not exist"),
        ("run .", 2, "is a folder"),
        ("run --nnodes 2 train.py", 2, "--nnodes 2"),
        ("run --no-python no-such-program", 2, "No program no-such-program"),
        ("run --use-supervisor x.py", 2, "FLYBALL_SUPERVISOR"),
        ("nonsense", 2, "nonsense"),
        ("status --nonsense", 2, "--nonsense"),
        ("status -o xml", 2, "xml"),
        ("status", 8, "No supervisor runs"),
        ("status --supervisor x", 2, "not a supervisor's address"),
        ("status --supervisor http://127.0.0.1:9", 9, "No token"),
        ("explain", 2, "issing"),
        ("explain dec-x", 2, "not a decision"),
        ("goodput missing.jsonl", 8, "missing.jsonl"),
        ("ckpt ls --dir missing", 8, "no folder missing"),
        ("ckpt ls --dir http://x/y", 3, "s3://"),
        ("ckpt show -- -1", 2, "not a step"),
        ("ckpt rm", 2, "Name the steps"),
        ("ckpt plan latest --supervisor x", 2, "not a supervisor's address"),
        ("inject kill", 2, "--job"),
        ("inject kill --job j --rank x", 2, "x"),
        ("demo --steps x", 2, "x"),
        ("up --port 70000", 2, "--port"),
        ("host --host-id A", 8, "No supervisor runs"),
    ],
)
def test_wrong_input(line: str, code: int, expected: str, tmp_path: Path) -> None:
    done = flyball(*line.split(), tmp_path=tmp_path)
    assert done.returncode == code, done
    assert expected in done.stderr
    assert "Next step: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_unreachable_supervisor_is_named(tmp_path: Path) -> None:
    done = flyball("status", "--supervisor", "http://127.0.0.1:9", tmp_path=tmp_path, FLYBALL_TOKEN="t" * 20)
    assert done.returncode == 10
    assert "http://127.0.0.1:9" in done.stderr


def test_help_has_examples_everywhere(tmp_path: Path) -> None:
    assert "flyball run train.py" in flyball("run", "--help", tmp_path=tmp_path).stdout
    for command in ("demo", "up", "host", "status", "explain", "goodput", "inject", "ckpt"):
        done = flyball(command, "--help", tmp_path=tmp_path)
        assert done.returncode == 0
        assert f"flyball {command}" in done.stdout.partition("Examples:")[2], command


def test_every_ckpt_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "show", "verify", "restore", "rm", "pin", "unpin", "plan"):
        assert run_cli(["ckpt", command, "--help"]) == 0
        assert f"flyball ckpt {command}" in capsys.readouterr().out.partition("Examples:")[2]


@pytest.mark.processes
def test_version_no_command_and_an_error_as_a_process(tmp_path: Path) -> None:
    assert process("--version", tmp_path=tmp_path).stdout.startswith("flyball ")
    done = process(tmp_path=tmp_path)
    assert done.returncode == 2
    assert "run" in done.stdout + done.stderr
    for line, code in (("run missing.py", 2), ("status", 8)):
        done = process(*line.split(), tmp_path=tmp_path)
        assert (done.returncode, done.stdout, "Next step: " in done.stderr) == (code, "", True), done


def test_notices_are_on_stderr(tmp_path: Path) -> None:
    transom = {"CKPT_ENGINE_MEM_LIMIT_GB": "9", "CKPT_ENGINE_HTTP_PORT": "15345"}
    done = flyball("run", "--monitor-interval", "1", "missing.py", tmp_path=tmp_path, **transom)
    assert "flyball: --monitor-interval 1.0: not needed: " in done.stderr
    assert "flyball: CKPT_ENGINE_MEM_LIMIT_GB: taken as FLYBALL_CKPT_MEMORY_LIMIT_BYTES=9GiB" in done.stderr
    assert "flyball: CKPT_ENGINE_HTTP_PORT: not used: " in done.stderr


def test_every_exit_code_is_documented() -> None:
    text = DOCS.read_text().partition("## Exit codes")[2]
    documented: set[int] = set()
    for first, last in re.findall(r"^\| (\d+)(?: to (\d+))? \|", text, flags=re.MULTILINE):
        documented |= set(range(int(first), int(last or first) + 1))
    used = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, FlyballError)}
    assert used <= documented


def test_goodput_of_an_event_log(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"at": 1.0, "kind": "job_submitted", "job": "j"}\n'
        "not an event\n"
        '{"at": 11.0, "kind": "job_ended", "job": "j", "data": {"outcome": "succeeded"}}\n'
    )
    done = flyball("goodput", "events.jsonl", "-o", "json", tmp_path=tmp_path)
    assert done.returncode == 0, done
    assert '"elapsed_s": 10' in done.stdout
    assert "events.jsonl:2" in done.stderr
    assert flyball("goodput", "events.jsonl", tmp_path=tmp_path).stdout


def test_control_characters_in_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of files and of tensors in manifests may come from anybody, and need not be text."""
    name = "a\x1b[2Jb\r\udcffé"
    announce(name)
    print_error(NotFound(name, hint=name))
    print_table("Places", ("where",), [[name], [[name]]])
    print_fields({"where": name})
    out, err = capsys.readouterr()
    for line in (out, err):
        assert "\x1b" not in line and "\r" not in line
    assert err.count("a\\x1b[2Jb\\r\\udcffé") == 3
    assert out.count("a\\x1b[2Jb\\r\\udcffé") == 3


def test_a_missing_database_file_is_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flyball.sqlite"
    assert run_cli(["replay", "--from-db", f"sqlite:///{file}"]) == 8
    assert str(file) in capsys.readouterr().err
    assert not file.exists()
