"""Policy settings that belong to a job: read from a file, checked, laid over the cluster's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import JOB, LOST, NOW, SAVED, SETTINGS, SPEC, decided, view, with_exit

from flyball.cli.policy_file import MAX_FILE_BYTES, read_policy
from flyball.contracts.cluster import JobSpec
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.errors import ConfigurationError, InvalidMessage
from services.api.routes import jobs as job_routes
from services.controller.replay import RoundInputs, StoredRound, decide_otherwise
from services.controller.round import job_policy
from services.controller.round.round import Case, Round
from services.controller.round.view import PolicySettings

HASTY = msgspec.structs.replace(SPEC, policy={"root_cause_window_s": 0.0})


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "root_cause_windw_s = 3\n",
            r"no setting 'root_cause_windw_s' \(line 1 of",
            "did you mean root_cause_window_s?",
        ),
        ("\n# waits\nverify_deadline_s = -1\n", r"verify_deadline_s \(line 3 of .*invalid value.*>= 0", "correct"),
        ("verify_deadline_s = 'long'\n", r"verify_deadline_s .*invalid value.*float", "correct"),
        ("spare_fresh_s = 3\n", "is the cluster's", "FLYBALL_POLICY__SPARE_FRESH_S"),
        ("[policy]\nverify_deadline_s = 9\n", r"section \[policy\]", "without sections"),
        ("verify_deadline_s =\n", "is not TOML.*line 1", "correct"),
        ("refill_steps = [[1]]\n", "wrong type", "numbers"),
        ("nonsense = 1\n", "no setting 'nonsense'", "it has: root_cause_window_s"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than", "own file"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path: Path, text: str, message: str, hint: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_policy(str(path))
    assert hint in caught.value.hint


def test_a_file_gives_only_what_it_sets(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("root_cause_window_s = 5  # seconds\nmax_decisions_per_incident = 3\n")
    given = read_policy(str(path))
    assert given == {"root_cause_window_s": 5, "max_decisions_per_incident": 3}
    changed = job_policy.settings_of(PolicySettings(verify_deadline_s=9.0), given)
    expected = {"verify_deadline_s": 9.0, "root_cause_window_s": 5.0, "max_decisions_per_incident": 3}
    assert changed == PolicySettings(**expected)
    assert read_policy("") == {}
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_policy(str(tmp_path / "none.toml"))


def test_the_api_refuses_what_the_command_line_would() -> None:
    spec = msgspec.structs.replace(SPEC, policy={"root_cause_windw_s": 3.0})
    with pytest.raises(InvalidMessage, match="no setting") as caught:
        job_routes._check(spec)
    assert "root_cause_window_s" in caught.value.hint
    job_routes._check(HASTY)


def test_settings_of_another_release_are_skipped() -> None:
    assert job_policy.settings_of(SETTINGS, {"from_the_future": 1, "verify_deadline_s": "long"}) == SETTINGS


def test_each_job_is_decided_by_its_own_settings() -> None:
    held = decided(decide(view(job=with_exit(LOST), copies=SAVED), [], SETTINGS, NOW))
    assert held.rule == "wait_for_the_root_cause"
    hasty = msgspec.structs.replace(with_exit(LOST), spec=HASTY)
    assert decided(decide(view(job=hasty, copies=SAVED), [], SETTINGS, NOW)).kind is DecisionKind.RESTART_IN_PLACE
    round_ = Round(view(), SETTINGS, NOW)
    assert Case(round_, JOB).settings is SETTINGS


def test_a_specification_of_an_older_release_has_no_policy() -> None:
    old = {k: v for k, v in msgspec.to_builtins(SPEC).items() if k != "policy"}
    assert msgspec.convert(old, JobSpec) == SPEC
    assert msgspec.convert(msgspec.to_builtins(HASTY), JobSpec) == HASTY


def test_another_policy_decides_a_stored_situation_again() -> None:
    then = view(job=with_exit(LOST), copies=SAVED)
    stored = StoredRound(1, NOW, 1, "0.1.0", (), RoundInputs(then, SETTINGS))
    before = decide(then, [], SETTINGS, NOW).decisions
    (other,) = decide_otherwise(stored, {"root_cause_window_s": 0.0}, before)
    assert other.then is not None and other.now is not None and not other.is_same
    assert (other.then.kind, other.now.kind) == (DecisionKind.HOLD, DecisionKind.RESTART_IN_PLACE)
    assert all(same.is_same for same in decide_otherwise(stored, {}, before))
    (gone,) = decide_otherwise(stored, {"root_cause_window_s": 0.0}, ())
    assert gone.then is None and not gone.is_same
