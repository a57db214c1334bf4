"""Every command that the documentation types is one that the program takes, and can be pasted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.documentation import PROGRAMS, ROOT, Line, commands_of, pages, program_of, prose

from flyball.cli.commands import SHORTHANDS, UsageProblem, as_click
from flyball.cli.goodput import command as goodput
from flyball.contracts.errors import FlyballError
from flyball.launch.launcher import parse_run

COMMANDS = [command for page in pages() for command in commands_of(page)]
_ROOT_COMMAND = as_click()
_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def words_of(command: str) -> list[str]:
    return shlex.split(re.sub(r"\s#\s.*", "", command).replace(";", " ; "))


def calls_of_flyball(words: list[str]) -> Iterator[list[str]]:
    """The arguments of each `flyball` of a command line, which may be inside `docker compose exec` or `srun`."""
    starts = [number for number, word in enumerate(words) if re.fullmatch(r"(\S*/)?bin/flyball|flyball", word)]
    for start in starts:
        if start and words[start - 1] in (
            "install",
            "--create-home",
            "cd",
            "start",
            "restart",
            "--peers",
            "REPOSITORY",
        ):
            continue  # a user or a unit of that name
        ends = [n for n in range(start, len(words)) if words[n] in ("|", ">", "&", "&&", ";", "||", ">>", ";")]
        yield words[start + 1 : min(ends, default=len(words))]


def refusal(arguments: list[str]) -> str | None:
    """Why the program does not take these arguments, or None."""
    arguments = [re.sub(r"^(\$[A-Z_]+|NUMBER|N|STEP)$", "3", word) for word in arguments]  # what stands for a number
    try:
        if arguments[:1] == ["run"]:
            parse_run(arguments[1:], {"FLYBALL_SUPERVISOR": "http://127.0.0.1:7370"})
            return None
        arguments = [SHORTHANDS.get(word, word) for word in arguments]
        if arguments[:1] == ["goodput"]:
            arguments = ["goodput", *goodput.in_full(arguments[1:])]
        _parse(_ROOT_COMMAND, "flyball", arguments, None)
    except UsageProblem as error:
        return str(error)
    except FlyballError as error:
        return error.message
    return None


def _parse(command: Any, name: str, arguments: list[str], parent: Any) -> None:  # noqa: ANN401 - click's
    """Parse with the command's own parser, without running anything."""
    try:
        context = command.make_context(name, list(arguments), parent=parent)
    except UsageProblem as error:
        if "does not exist" in str(error):
            return  # a file that the reader has
        raise
    except (SystemExit, RuntimeError):
        return  # --help, --version
    rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
    if getattr(command, "commands", None) and rest:
        below, found, left = command.resolve_command(context, rest)
        _parse(found, below, left, context)


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 200
    assert refusal(["status", "--nodes"]) and refusal(["goodputt"]) and refusal(["run", "--nnodez", "2", "train.py"])
    assert refusal(["get", "jobs", "of", "mine"])


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: f"{line.page}:{line.number}")
def test_a_command_can_be_pasted(line: Line) -> None:
    """What explains it begins with `#`: no prose follows the command in columns, and no line is prose."""
    text = line.text
    if text.lstrip().startswith("#"):
        return
    assert program_of(text) in ("", *PROGRAMS), f"{line}: no command"
    without_comment = re.sub(r"\s+#\s.*", "", text)
    assert not re.search(r"\S {2,}\S", re.sub(r"'[^']*'", "Q", without_comment)), f"{line}: what explains it needs a #"
    words = words_of(text)
    for arguments in calls_of_flyball(words):
        assert refusal(arguments) is None, f"{line}: {refusal(arguments)}"
    if program_of(text) == "make":
        assert {word for word in words[1:] if word.islower() and "=" not in word} <= _TARGETS
    for word in words:
        if re.fullmatch(r"(benchmarks|deploy|examples|simulator|tests)/[\w/.-]+", word):
            assert (ROOT / word).exists() or "PEER" in word, f"{line}: {word} does not exist"
    script = next((word for word in words if re.fullmatch(r"(benchmarks|deploy|simulator)/\w+\.py", word)), None)
    if script:
        folder = (ROOT / script).parent
        source = "\n".join(path.read_text() for path in folder.rglob("*.py"))
        own = words[words.index(script) + 1 :]
        own = own[: own.index("--")] if "--" in own else own
        flags = [word.partition("=")[0] for word in own if word.startswith("--")]
        assert [flag for flag in flags if f'"{flag}"' not in source] == [], f"{line}: flags of {script}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_command_in_a_sentence_is_one(page: Path) -> None:
    """It may leave out arguments, but has no flag and no word that the program does not know."""
    refused = {}
    for span in re.findall(r"`(flyball [a-z][^`]*)`", prose(page).replace("\n", " ")):
        for arguments in calls_of_flyball(words_of(span)):
            why = refusal([word for word in arguments if word != "..." or arguments[0] == "run"])
            if why and not re.match(r"Missing|No script is given|Option .* requires an argument", why):
                refused[span] = why
    assert refused == {}
