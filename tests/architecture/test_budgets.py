"""What the project may grow to: tests/architecture/budgets.toml. Raising a figure is a line in a decision
(docs/decisions); a new capability pays for its room with something that goes."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from flyball.cli.commands import app
from flyball.launch.launch_flags import ALL_FLAGS, FlagOrigin

ROOT = Path(__file__).resolve().parents[2]
BUDGETS: Mapping[str, Any] = tomllib.loads((ROOT / "tests" / "architecture" / "budgets.toml").read_text())
PRODUCT = ("flyball", "services", "host_daemon", "ckpt_engine", "goodput", "simulator")
PYTHON = (*PRODUCT, "benchmarks", "deploy", "examples", "tests")


@cache
def files(folder: str) -> Mapping[str, str]:
    """The text of each Python file below, by its path."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    names = {str(path.relative_to(ROOT)): path for path in paths}
    return {name: path.read_text() for name, path in names.items() if "/versions/" not in name}


def count(text: str) -> int:
    return len(text.splitlines())


def over(found: Mapping[str, int], allowed: Mapping[str, int], usual: int) -> list[str]:
    """What has more than `usual` and more than it is allowed, and what is allowed more than it needs."""
    wrong = [
        f"{name}: {n}, at most {allowed.get(name, usual)}" for name, n in found.items() if n > allowed.get(name, usual)
    ]
    return wrong + [
        f"{name}: not over {usual} any more, remove its line" for name in allowed if found.get(name, 0) <= usual
    ]


@pytest.mark.parametrize("package", PYTHON)
def test_lines_of_python(package: str) -> None:
    assert sum(count(text) for text in files(package).values()) <= BUDGETS["lines"][package]


def test_lines_of_a_file() -> None:
    found = {path: count(text) for folder in PYTHON for path, text in files(folder).items()}
    assert over(found, BUDGETS["lines_of_a_file"], 400) == []


def test_files_of_a_folder() -> None:
    """A folder in a folder counts, and an empty __init__.py does not."""
    folders = {
        parent for folder in PYTHON for path in files(folder) for parent in Path(path).parents if parent != Path()
    }
    found = {
        str(folder): sum(
            (entry.is_dir() and any(entry.rglob("*.py"))) or (entry.suffix == ".py" and entry.name != "__init__.py")
            for entry in (ROOT / folder).iterdir()
        )
        for folder in sorted(folders)
    }
    assert over(found, BUDGETS["files_of_a_folder"], 15) == []


def constructors() -> Iterator[tuple[str, int]]:
    for folder in PRODUCT:
        for path, text in files(folder).items():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    for made in node.body:
                        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                            yield (
                                f"{path}:{node.name}",
                                len(made.args.posonlyargs + made.args.args + made.args.kwonlyargs) - 1,
                            )


def test_arguments_of_a_constructor() -> None:
    assert over(dict(constructors()), BUDGETS["arguments_of_a_constructor"], 8) == []


def test_settings() -> None:
    """Of the page that a test compares with the code."""
    rows = re.findall(r"^\| `\w+` \|", (ROOT / "docs" / "reference" / "configuration.md").read_text(), re.MULTILINE)
    assert 50 < len(rows) <= BUDGETS["settings"]


def options(command: Any) -> Iterator[str]:  # noqa: ANN401 - one of click's
    for parameter in command.params:
        yield from (f"{command.name} {name}" for name in parameter.opts if name.startswith("--"))
    for below in getattr(command, "commands", {}).values():
        yield from options(below)


def test_flags_of_the_command_line() -> None:
    """Those that torchrun has as well are not ours."""
    own = [flag for flag in ALL_FLAGS if flag.origin is not FlagOrigin.TORCHRUN]
    found = [*options(typer.main.get_command(app)), *(flag.names[0] for flag in own)]
    assert 50 < len(found) <= BUDGETS["flags"]


def test_words_of_the_documentation() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    found = {str(page.relative_to(ROOT)): len(re.findall(r"\S+", page.read_text())) for page in pages}
    assert sum(found.values()) <= BUDGETS["words"]["all"]
    assert {name: found[name] for name, most in BUDGETS["words"].items() if name != "all" and found[name] > most} == {}
