"""The files that hold what the policy says: how they read, and that each section is of a test."""

from __future__ import annotations

import re
from pathlib import Path

from support.policy import golden

TESTS = Path(__file__).resolve().parents[1]


def test_every_section_is_of_a_test() -> None:
    kept = sorted(TESTS.rglob(f"{golden.FOLDER}/*.txt"))
    tests = {path: path.parents[1] / f"{path.stem}.py" for path in kept}
    assert kept and [path for path, of in tests.items() if not of.exists()] == []
    known = {path: set(re.findall(r"^def (test_\w+)", of.read_text(), re.MULTILINE)) for path, of in tests.items()}
    assert {p.name: gone for p in kept if (gone := golden.sections(p).keys() - known[p])} == {}, "run `make goldens`"


def test_a_test_differs_by_what_it_says_more_and_by_what_it_says_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    path.write_text(golden.written({"test_a": {("rule", "It is."): None}, "test_b": {("rule", "It was."): None}}))
    assert path.read_text() == "test_a\n  rule\n    It is.\n\ntest_b\n  rule\n    It was.\n"
    kept = golden.sections(path)
    assert golden.difference(kept, "test_b", {("rule", "It is."): None}, is_whole=False) == ""
    assert golden.difference(kept, "test_b", {("rule", "It is."): None}, is_whole=True) == "- rule: It was."
    assert golden.difference(kept, "test_c", {("other", "It is."): None}, is_whole=True) == "+ other: It is."
