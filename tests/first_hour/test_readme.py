"""The README's snippet, as it stands there, with an evaluation of 8 s."""

from __future__ import annotations

import json

from users_machine import User
from users_scripts import readme_script

EXPECTED = {"start_job", "complete_job"}


def decisions(user: User) -> list[str]:
    status = json.loads(user.run("flyball status -o json"))
    return [decision["kind"] for decision in status["decisions"]]


def test_the_snippet_with_an_evaluation_of_eight_seconds(user: User) -> None:
    user.script("train.py", readme_script())
    said = user.run("flyball run train.py")
    assert "trained 610" in said
    assert said.count("evaluated") == 2
    assert "succeeded" in said
    assert set(decisions(user)) == EXPECTED


def test_nobody_needs_to_name_the_evaluation(user: User) -> None:
    unnamed = readme_script().replace('with job.phase("eval"):', "if True:")
    assert "if True:" in unnamed
    user.script("train.py", unnamed)
    said = user.run("flyball run train.py")
    assert said.count("evaluated") == 2
    assert "succeeded" in said
    assert set(decisions(user)) == EXPECTED
