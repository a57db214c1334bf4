"""What a script prints cannot act on the terminal of whoever reads it with `logs`, `describe` or `explain`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from flyball.cli.logs.escaped_output import EscapedOutput
from flyball.cli.look.stories import print_decision
from flyball.cli.main import run_cli
from flyball.cli.show.output import unescaped

HOSTILE = "\x1b]52;c;aGk=\x07 \x9b2J \u202eevil\u2066 \x1b[2K \x1bc \x08\x7f"
SHOWN = "\\x1b]52;c;aGk=\\x07 \\x9b2J \\u202eevil\\u2066 \\x1b[2K \\x1bc \\x08\\x7f"


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def shown(*pieces: bytes) -> bytes:
    terminal = Terminal()
    out = EscapedOutput.on(terminal, raw=False)
    for piece in pieces:
        out.write(piece)
    return terminal.getvalue()


def test_control_characters_are_text_on_a_terminal() -> None:
    assert shown(HOSTILE.encode()).decode() == SHOWN
    assert shown(b"\x9b2J\xff") == b"\\x9b2J\\xff"  # what an 8-bit terminal takes for a control sequence


def test_what_does_not_harm_passes() -> None:
    harmless = "\r 10%\r 20%\n\t\x1b[32mgreen\x1b[0m \x1b[38;2;1;2;3mé 漢字 🙂\n".encode()
    assert shown(harmless) == harmless


def test_pieces_may_end_anywhere() -> None:
    data = ("é\x1b[32mx\x1b[0m " + HOSTILE + " 🙂").encode()
    whole = shown(data)
    assert shown(*(data[i : i + 1] for i in range(len(data)))) == whole
    assert b"\x1b]" not in whole


def test_a_pipe_and_raw_get_the_bytes() -> None:
    pipe, terminal = io.BytesIO(), Terminal()
    assert EscapedOutput.on(pipe, raw=False) is pipe
    assert EscapedOutput.on(terminal, raw=True) is terminal


@pytest.mark.parametrize("raw", [False, True])
def test_logs_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bool) -> None:
    monkeypatch.setenv("FLYBALL_STATE_DIR", str(tmp_path))
    log = tmp_path / "jobs/r/host/logs/llama/g0/rank0.log"
    log.parent.mkdir(parents=True)
    log.write_text(HOSTILE)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(terminal))
    assert run_cli(["logs", "llama", *(["--raw"] if raw else [])]) == 0
    assert terminal.getvalue().decode() == (HOSTILE if raw else SHOWN)


def decision() -> dict[str, object]:
    return {
        "decision_id": "dec-1",
        "reason": HOSTILE,
        "signals": [{"kind": "worker_exited", "body": {"rank": 0, "log_tail": f"first\n{HOSTILE}"}}],
        "stands": [
            {"rank": 0, "host_id": "host-a", "kind": "sync", "place": HOSTILE, "stack": f"{HOSTILE}\nf (a.py:1)"}
        ],
    }


def test_the_end_of_a_log_and_a_stack_are_text_in_a_story(capsys: pytest.CaptureFixture[str]) -> None:
    print_decision(decision())
    told = capsys.readouterr().out
    assert f"  first\n  {SHOWN}\n" in told
    assert f"  {SHOWN}\n  f (a.py:1)\n" in told
    assert not set("\x1b\x9b\u202e\u2066\x07\x08\x7f") & set(told)


def test_raw_stories_are_as_they_came(capsys: pytest.CaptureFixture[str]) -> None:
    with unescaped(True):
        print_decision(decision())
    assert f"  first\n  {HOSTILE}\n" in capsys.readouterr().out
    print_decision(decision())
    assert HOSTILE not in capsys.readouterr().out


def test_a_fifo_in_place_of_a_log_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    monkeypatch.setenv("FLYBALL_STATE_DIR", str(tmp_path))
    log = tmp_path / "jobs/r/host/logs/llama/g0/rank0.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    assert run_cli(["logs", "llama"]) != 0
    assert "not a regular file" in capsys.readouterr().err
