"""What a user installs with Flyball: all that it imports, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flyball", "services", "host_daemon", "ckpt_engine", "goodput", "simulator")
BY_URL = {"pymysql"}  # SQLAlchemy imports it for mysql+pymysql:// URLs


def imported() -> set[str]:
    """The top-level modules of others that our packages import anywhere."""
    found: set[str] = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(PACKAGES) - set(sys.stdlib_module_names)


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_dependencies_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in project["dependencies"]}  # type: ignore[index]
    names = packages_distributions()
    needed = {plain(names[module][0]) for module in imported()}
    assert declared == needed | BY_URL
