"""What tests share is in tests/support, once: no test makes a cluster of its own, and no helper lies loose."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def test_a_module_of_support_serves_several_tests() -> None:
    """By itself, through a conftest, or as a part of another such module. Else it belongs beside its only user. A
    script is named by its file."""
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    words = {path: set(re.findall(r"[\w.]+", text)) for path, text in texts.items()}

    def serves(module: Path) -> bool:
        room = ".".join(module.parent.relative_to(TESTS).parts)
        named = {f"{room}.{module.stem}", module.name}
        imported = re.compile(rf"from {re.escape(room)} import .*\b{module.stem}\b")
        users = [
            path
            for path in texts
            if path != module and (words[path] & named or imported.search(texts[path]) is not None)
        ]
        return len(users) > 1 or any(path.name == "conftest.py" or SUPPORT in path.parents for path in users)

    assert [str(module) for module in MODULES if not serves(module)] == []
