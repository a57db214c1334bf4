"""What tests share is in tests/support, once: no test makes a cluster of its own, and no helper lies loose."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUPPORT = TESTS / "support"
MODULES = sorted(SUPPORT.rglob("*.py"))


def test_no_helper_lies_beside_the_folders_of_the_tests() -> None:
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]


def test_clusters_and_hosts_are_made_in_support_alone() -> None:
    """A class outside that is no cluster of processes, and no host, has a name for what it is."""
    found = [
        f"{path.relative_to(TESTS)}: {node.name}"
        for path in TESTS.rglob("*.py")
        if SUPPORT not in path.parents
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and re.search(r"(Cluster|Hosts?)$", node.name)
    ]
    assert found == []


def test_conftest_files_outside_hold_no_classes() -> None:
    found = [
        f"{path.relative_to(TESTS)}: {node.name}"
        for path in TESTS.rglob("conftest.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert found == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: f"{module.parent.name}-{module.stem}")
def test_a_module_of_support_serves_several_tests(module: Path) -> None:
    """By itself, through a conftest, or as a part of another such module. Else it belongs beside its only user. A
    script is named by its file."""
    room = r"support" if module.parent == SUPPORT else rf"support\.{module.parent.name}"
    named = re.compile(
        rf'{room}\.{module.stem} import|from {room} import .*\b{module.stem}\b|/{module.stem}\.py"|"{module.name}"'
    )
    users = [path for path in TESTS.rglob("*.py") if path != module and named.search(path.read_text())]
    serves = [path for path in users if path.name == "conftest.py" or SUPPORT in path.parents]
    assert serves or len(users) > 1, users
