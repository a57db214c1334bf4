"""What a user installs with Flyball: all that it imports, and nothing else; the adapters import what they adapt."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flyball", "services", "host_daemon", "ckpt_engine", "goodput", "simulator")
ADAPTERS = ROOT / "ckpt_engine" / "frameworks"
BY_URL = {"pymysql"}  # SQLAlchemy imports it for mysql+pymysql:// URLs


def imported(paths: Iterable[Path]) -> set[str]:
    """The top-level modules of others that these files import anywhere."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(PACKAGES) - set(sys.stdlib_module_names)


def test_no_wait_swallows_a_cancellation() -> None:
    """`asyncio.wait_for` of Python 3.11 may: a loop around it then never ends. `asyncio.timeout` does not."""
    uses = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "asyncio.wait_for" in path.read_text()
    ]
    assert uses == []


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirements: list[str]) -> set[str]:
    return {plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}  # type: ignore[index]


def test_dependencies_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = packages_distributions()
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    needed = {plain(names[module][0]) for module in imported(path for path in paths if ADAPTERS not in path.parents)}
    assert named(project["dependencies"]) == needed | BY_URL
    adapted = imported(path for path in paths if ADAPTERS in path.parents)
    others = {plain(module) for module in adapted if module not in names} - needed
    alone = (ROOT / "tests" / "frameworks" / "without_dependencies.txt").read_text().splitlines()
    packages = named(project["optional-dependencies"]["integrations"] + [line for line in alone if line[0] != "#"])
    assert others <= {name.removesuffix("-core") for name in packages}  # megatron-core has the module megatron
