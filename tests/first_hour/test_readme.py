"""The README's snippet, unchanged, with an evaluation of 8 s."""

from __future__ import annotations

import json

from support.commands.users_machine import User
from support.jobs.users_scripts import readme_script

EXPECTED = {"start_job", "complete_job"}


def decisions(user: User) -> list[str]:
    status = json.loads(user.run("flyball status -o json"))
    return [decision["kind"] for decision in status["decisions"]]


def test_the_snippet_with_an_evaluation_of_eight_seconds(user: User) -> None:
    user.script("train.py", readme_script())
    output = user.run("flyball run train.py")
    assert "trained 610" in output
    assert output.count("evaluated") == 2
    assert "succeeded" in output
    assert set(decisions(user)) == EXPECTED


def test_the_evaluation_need_not_be_announced(user: User) -> None:
    unnamed = readme_script().replace('with job.phase("eval"):', "if True:")
    assert "if True:" in unnamed
    user.script("train.py", unnamed)
    output = user.run("flyball run train.py")
    assert output.count("evaluated") == 2
    assert "succeeded" in output
    assert set(decisions(user)) == EXPECTED
