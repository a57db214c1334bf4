"""Tables and fields for people: what is wrapped where the terminal is narrow, and what never is."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from rich.cells import cell_len
from rich.text import Text

from flyball.cli.look.describe import _print_newest
from flyball.cli.look.stories import print_action, print_signal
from flyball.cli.show.output import Format, OutputOption, print_fields, print_table

NOW = 1_795_413_958.0  # 2026-11-23 06:05:58 UTC
SENTENCE = "Rank 0 on host-001 (pid 13207) was killed by signal 9 (SIGKILL) after step 70."


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")


@pytest.mark.usefixtures("terminal")
def test_sentences_are_wrapped_and_times_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ("incident", "last report", "state", "what happened")
    print_table("Incidents", columns, [["inc-2", "3 min 20 s ago", "resolved", SENTENCE]])
    out = capsys.readouterr().out
    assert "3 min 20 s ago  resolved  Rank 0 on" in out
    assert max(cell_len(Text.from_ansi(line).plain) for line in out.splitlines()) <= 80


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", [12, 50, 80])
def test_no_word_is_cut_however_narrow_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ids = ["checkpoint_requested_by_somebody", "resolved", "llama-8a81a7", "host-001", "3 min 20 s ago"]
    print_table("Incidents", ("cause", "state", "job", "host", "at", "what"), [[*ids, SENTENCE]])
    assert set(" ".join((*ids, SENTENCE)).split()) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("output", [*Format])
def test_in_a_pipe_and_with_wide_a_row_is_a_line(
    output: Format, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if output is Format.WIDE:
        monkeypatch.setenv("FORCE_COLOR", "1")

    def command(output: OutputOption = Format.TABLE) -> None:
        print_table("Incidents", ("cause", "what"), [["worker_killed", f"{SENTENCE}\n" * 9]])

    app = typer.Typer()
    app.command()(command)
    app(["-o", output], standalone_mode=False)
    assert f" worker_killed  {' '.join([SENTENCE] * 9)}" in capsys.readouterr().out.splitlines()


def test_fields_stay_whole_in_a_pipe_and_are_wrapped_beside_their_names_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_fields({"reason": SENTENCE})
    assert capsys.readouterr().out == f"reason  {SENTENCE}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_fields({"reason": SENTENCE})
    assert capsys.readouterr().out.splitlines() == [
        "reason  Rank 0 on host-001 (pid 13207) was killed by signal 9 (SIGKILL) after",
        "        step 70.",
    ]


def test_a_hosts_name_stays_whole_where_a_line_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_fields({"reason": "the ranks that were lost with the switch of this rack have moved to rack-a-host-0017."})
    assert capsys.readouterr().out.splitlines()[1] == "        rack-a-host-0017."


def test_what_is_described_has_no_column_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    one: dict[str, Any] = {"decision_id": "dec-4", "at": NOW, "job": "llama", "kind": "hold", "reason": "It waits."}
    _print_newest("decisions", [one], NOW, about="job")
    out = capsys.readouterr().out
    assert "dec-4     06:05:58  hold  It waits." in out and "llama" not in out


def test_a_signal_is_told_in_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"type": "worker_exited", "job": "llama", "generation": 1, "rank": 0, "last_phase": 2, "signal_number": 9}
    print_signal(
        {
            **{"signal_id": "sig-1", "kind": "worker_exited", "at": NOW, "stored_at": NOW + 0.04, "source": "host-001"},
            **{"host_id": "host-001", "job": "llama", "generation": 1, "body": body | {"log_tail": "Traceback"}},
        }
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["observed", "06:05:58.000", "UTC"] in lines and ["last_phase", "step"] in lines
    assert lines.count(["job", "llama"]) == 1 and ["Traceback"] in lines


def test_the_times_of_a_table_name_their_zone_once(capsys: pytest.CaptureFixture[str]) -> None:
    phase = {"at": NOW, "phase": "stop", "state": "dispatched", "message": "stopping"}
    names = ("action_id", "decision_id", "incident_id", "job", "kind", "state", "phase", "attempt", "message")
    print_action(dict.fromkeys(names, "x") | {"started_at": NOW, "ended_at": None, "phases": [phase], "commands": []})
    out = capsys.readouterr().out
    assert "at (UTC)" in out and "06:05:58.000  stop" in out
