"""The page for the first change is true: its test fails without its rule, and passes with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.policy import checked

from services.controller import policy
from services.controller.rules import recovery_rules

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "contributing" / "first-change.md").read_text()
TESTS = "tests/unit/control/test_brains_recovery.py"
TEST, RULE, LIST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def made(before: str, snippet: str) -> Callable[..., Any]:
    """The function of a snippet that is written at the end of a file."""
    names: dict[str, Any] = {"__name__": "first_change"}
    exec(compile(f"{before}\n\n{snippet}", "first-change.md", "exec", dont_inherit=True), names)
    return names[snippet.partition("(")[0].removeprefix("def ")]  # type: ignore[no-any-return]  # a function


def test_its_test_fails_without_its_rule_and_passes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    test, rule = made((ROOT / TESTS).read_text(), TEST), made(Path(recovery_rules.__file__).read_text(), RULE)
    new, below = (line.strip(" ,").removeprefix("recovery_rules.") for line in LIST.splitlines())
    assert rule.__name__ == new
    others = tuple(other for other in policy.FAILURE_RULES if other.__name__ != new)  # also where the exercise is done
    monkeypatch.setattr(policy, "FAILURE_RULES", others)
    with pytest.raises(AssertionError):
        test()
    at = others.index(getattr(recovery_rules, below))
    monkeypatch.setattr(policy, "FAILURE_RULES", (*others[:at], rule, *others[at:]))
    monkeypatch.setattr(checked, "RULE_NAMES", {*checked.RULE_NAMES, new})
    test()


def test_the_files_and_targets_that_it_names_are_there() -> None:
    named = set(re.findall(r"`?((?:services|tests)/[\w/]+\.py)", PAGE))
    assert len(named) == 5 and [name for name in named if not (ROOT / name).exists()] == []
    targets = set(re.findall(r"^make (\w+)", PAGE, re.MULTILINE))
    assert targets == {"setup", "hooks", "goldens", "test", "lint"}
    assert [t for t in targets if not re.search(rf"^{t}:", (ROOT / "Makefile").read_text(), re.MULTILINE)] == []
