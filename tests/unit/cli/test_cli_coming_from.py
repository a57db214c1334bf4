"""docs/how-to/coming-from.md matches the program: every row is parsed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser

from flyball.contracts.errors import UsageError
from flyball.launch.launch_flags import ALL_FLAGS, TRANSOM_SETTINGS, TRANSOM_VARIABLES, Use
from flyball.launch.launcher import parse_run

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "coming-from.md"
ENVIRONMENT = {"FLYBALL_SUPERVISOR": "http://127.0.0.1:7370"}


class Row(NamedTuple):
    theirs: str
    ours: str
    how: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        match = re.fullmatch(r"\| `([^`]+)` \| (.+) \| (\w+) \|", line)
        if match:
            found.append(Row(*match.groups()))
        else:
            assert not line.startswith("| `"), f"a row without the form of the tables: {line}"
    return found


ROWS = rows()


def named(row: Row) -> str:
    return shlex.split(row.theirs)[0]


@pytest.mark.parametrize("row", [r for r in ROWS if r.theirs.startswith("-")], ids=lambda r: r.theirs)
def test_a_flag_does_what_its_row_says(row: Row) -> None:
    words = shlex.split(row.theirs)
    if row.how == "script":
        assert parse_run(["train.py", *words], {}).argv == ("train.py", *words)
        return
    if row.how == "refused":
        with pytest.raises(UsageError) as caught:
            parse_run([*words, "train.py"], {})
        assert words[0] in caught.value.message
        assert caught.value.hint
        return
    request = parse_run([*words, "train.py", "--lr", "3e-4"], ENVIRONMENT, lambda path: {})
    if not row.theirs.startswith("--help"):
        assert request.argv == ("train.py", "--lr", "3e-4")
    notices = [n for n in request.notices if n.startswith(words[0])]
    if row.how == "noted":
        assert len(notices) == 1


@pytest.mark.parametrize("row", [r for r in ROWS if "=" in r.theirs and r.theirs[0] != "-"], ids=lambda r: r.theirs)
def test_a_variable_is_named_on_stderr(row: Row) -> None:
    name, _, value = row.theirs.partition("=")
    request = parse_run(["train.py"], {name: value})
    notices = request.notices
    assert len(notices) == 1
    if row.how == "honoured":
        variable = "FLYBALL_CKPT_" + TRANSOM_SETTINGS[name].upper()
        assert notices[0] == f"{name}: taken as {variable}={request.engine_environment[variable]}"
        return
    assert notices[0].startswith(f"{name}: not used: ")
    assert value not in notices[0] or len(value) < 3, "a value may be a secret"
    assert row.how == "noted"


def test_the_page_has_every_flag_and_variable() -> None:
    page = {named(row) for row in ROWS}
    for flag in ALL_FLAGS:
        assert page & set(flag.spellings), f"{flag.names} has no row"
    for row in ROWS:
        for flag in ALL_FLAGS:
            if named(row) in flag.spellings:
                assert (row.how == "refused") == (flag.use is Use.REFUSED), row
                assert (row.how == "noted") == (flag.use is Use.NOTED), row
    assert {row.theirs.partition("=")[0] for row in ROWS if row.theirs[0] != "-"} == {
        *TRANSOM_VARIABLES,
        *TRANSOM_SETTINGS,
    }


def test_every_flag_of_the_installed_torchrun_is_known() -> None:
    known = {spelling for flag in ALL_FLAGS for spelling in flag.spellings}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert theirs - known == set()
