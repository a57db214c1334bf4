"""What all commands have in common: examples in their help, and one way to choose the output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands.here import run_here
from support.commands.left_runs import left

from flyball.cli import completion
from flyball.cli.commands import as_click
from flyball.cli.look.kinds import NAMES
from flyball.cli.show.output import Format

OWN_GRAMMAR = {"run"}  # handled before typer: torchrun's flags
PRINT_ONE_WORD = {"inject clock", "token host", "token operator", "token reader", "token rotate"}
FOLLOW_OR_WRITE_FILES = {  # with formats of their own
    "host",
    "inject agent",
    "goodput export",
    "goodput report",
    "goodput compare",
    "simulate describe",
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - a click group
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if getattr(command, "commands", None):
            yield from commands(command, (*path, name))
        if not getattr(command, "commands", None) or command.invoke_without_command:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(as_click()))


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - OWN_GRAMMAR))
def test_every_command_shows_an_example_of_itself(name: str) -> None:
    command = COMMANDS[name]
    assert f"flyball {name}" in " ".join(str(command.epilog).partition("Examples:")[2].split()), name
    assert command.help


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - OWN_GRAMMAR - PRINT_ONE_WORD - FOLLOW_OR_WRITE_FILES))
def test_every_command_with_a_result_takes_the_same_outputs(name: str) -> None:
    option = next((param for param in COMMANDS[name].params if "-o" in param.opts), None)
    assert option is not None, f"flyball {name} has no -o"
    assert option.opts == ["-o", "--output"]
    assert completion._choices(option) == [format.value for format in Format]


def test_json_yaml_and_wide_by_their_names_and_shorthands(tmp_path: Path) -> None:
    left(tmp_path, "llama", at=1_700_000_000.0)
    as_json, as_yaml, wide = (
        run_here("status", *words, environment={"FLYBALL_STATE_DIR": str(tmp_path)})
        for words in (("--json",), ("-o", "yaml"), ("--wide",))
    )
    assert json.loads(as_json.stdout)["jobs"][0]["job"] == "llama"
    assert yaml.safe_load(as_yaml.stdout) == json.loads(as_json.stdout)
    assert "Jobs" in wide.stdout and "Shards between hosts" in wide.stdout


def test_every_kind_is_listed_without_a_supervisor(tmp_path: Path) -> None:
    supervisor = left(tmp_path, "llama", at=1_700_000_000.0) / "supervisor"
    (supervisor / "simulations").mkdir()
    (supervisor / "simulations" / "Torn.json").write_text("{}")
    for kind in NAMES:
        found = run_here("get", kind, environment={"FLYBALL_STATE_DIR": str(tmp_path)})
        assert found.returncode == 0 and found.stdout.startswith(kind.capitalize()), f"{kind}: {found.stderr}"
        assert ("Torn.json is not a result" in found.stdout) == (kind == "simulations")
