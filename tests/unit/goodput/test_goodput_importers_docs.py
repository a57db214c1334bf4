"""docs/reference/goodput/importers.md is true: its commands run, with the output shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flyball.cli.main import run_cli
from goodput.account.google_resiliency import measure
from goodput.read.event_files import MalformedLines
from goodput.read.importers.options import KEYS
from goodput.read.importers.registry import FORMATS, read_entries

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "reference" / "goodput" / "importers.md").read_text()
# A block of commands on samples, and what the last one prints.
EXAMPLES = re.findall(
    r"^```console\n((?:\$ flyball goodput report tests/.*\n)+)((?:.*\n)*?)```$", DOCUMENT, re.MULTILINE
)


@pytest.mark.parametrize(("commands", "output"), EXAMPLES)
def test_a_worked_example(
    commands: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    printed = ""
    for command in commands.splitlines():
        assert run_cli(shlex.split(command)[2:]) == 0
        printed = capsys.readouterr().out
    assert output and output in printed + "\n"


def test_every_format_and_key_of_a_map_is_documented() -> None:
    assert len(EXAMPLES) == 7
    for name in FORMATS[1:]:
        assert f"| `{name}` |" in DOCUMENT
    for key in KEYS:
        assert f"`{key}=" in DOCUMENT


def test_a_reference_step_that_is_too_long_hides_any_loss() -> None:
    entries = read_entries([ROOT / "tests" / "goodput_logs" / "google_resiliency.jsonl"], MalformedLines())
    percentage = measure(entries, reference_step_time_s=13.5).goodput_percentage
    assert f"comes to {percentage:.2f}%" in " ".join(DOCUMENT.split())
