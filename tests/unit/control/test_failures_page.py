"""The page about failures is generated from the rules, covers every cause, and is up to date."""

from __future__ import annotations

from pathlib import Path

from services.controller import failures_page, policy
from services.controller.round.diagnosis import CAUSES

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "failures.md"


def test_the_page_is_what_the_rules_say() -> None:
    assert PAGE.read_text() == failures_page.page(), (
        "python -m services.controller.failures_page > docs/reference/failures.md"
    )


def test_every_cause_has_its_evidence() -> None:
    assert set(failures_page.EVIDENCE) == CAUSES


def test_every_rule_says_in_a_sentence_what_it_does() -> None:
    for cause in failures_page.EVIDENCE:
        for rule in (*policy.rules_for(cause), *policy.GUARDS):
            assert rule.__doc__ and rule.__doc__.split("\n\n")[0].rstrip().endswith("."), rule.__name__
