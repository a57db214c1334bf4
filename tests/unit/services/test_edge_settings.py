"""Settings from arguments and the environment, with errors that name the wrong setting and never show a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyball.contracts.errors import ConfigurationError
from services.runtime.telemetry import Metrics
from services.settings import load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FLYBALL_PORT", "FLYBALL_TOKEN", "FLYBALL_HOST", "FLYBALL_DATABASE_URL", "FLYBALL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLYBALL_STATE_DIR", str(tmp_path))


def test_defaults_listen_on_loopback_and_keep_everything_in_the_folder(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.host == "127.0.0.1"
    assert settings.resolved_database_url == f"sqlite:///{tmp_path / 'flyball.sqlite'}"
    assert settings.policy_settings.root_cause_window_s == 2.0


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_PORT", "1234")
    assert load_settings().port == 1234
    assert load_settings(port=0).port == 0
    assert load_settings(port=None).port == 1234


def test_single_numbers_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_POLICY__ROOT_CAUSE_WINDOW_S", "0.5")
    policy = load_settings(policy={"max_decisions_per_incident": 3}).policy_settings
    assert policy.max_decisions_per_incident == 3
    monkeypatch.setenv("FLYBALL_POLICY", "{}")
    assert load_settings().policy_settings.root_cause_window_s == 0.5


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"port": 70_000}, "port"),
        ({"policy": {"no_such_number": 1}}, "no_such_number"),
        ({"detector": {"no_such_number": 1}}, "no_such_number"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"tls_cert_file": "cert.pem"}, "certificate and a key"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        load_settings(**wrong)
    assert caught.value.hint


@pytest.mark.parametrize("detector", ['{"tick_s": 0.05}', '{"silence": {"tick_s": 1}}', '{"stalls": {"tick_s": 1}}'])
def test_an_unknown_or_removed_field_of_the_detector_is_refused(monkeypatch: pytest.MonkeyPatch, detector: str) -> None:
    monkeypatch.setenv("FLYBALL_DETECTOR", detector)
    with pytest.raises(ConfigurationError, match=r"detector.*unknown field `tick_s`"):
        load_settings()


def test_the_variable_of_a_removed_setting_is_ignored_and_its_argument_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_MAX_STREAMS", "64")
    load_settings()
    with pytest.raises(ConfigurationError, match="max_streams"):
        load_settings(max_streams=64)


def test_a_short_token_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_TOKEN", "hunter2")
    with pytest.raises(ConfigurationError, match=r"token: .*at least 16") as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)
    assert "sixteen-or-more-characters" not in repr(load_settings(token="sixteen-or-more-characters"))


def test_two_supervisors_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.reports_received.inc()
    assert first.registry.get_sample_value("flyball_reports_received_total") == 1.0
    assert second.registry.get_sample_value("flyball_reports_received_total") == 0.0


def test_which_token_of_a_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().host_token_epochs == {}
    monkeypatch.setenv("FLYBALL_HOST_TOKEN_EPOCHS", '{"node-7": 2}')
    assert load_settings().host_token_epochs == {"node-7": 2}
    for wrong in ('{"no/name": 1}', '{"node-7": -1}', '{"node-7": "x"}', "node-7=1"):
        monkeypatch.setenv("FLYBALL_HOST_TOKEN_EPOCHS", wrong)
        with pytest.raises(ConfigurationError, match="host_token_epochs"):
            load_settings()


def test_a_tally_is_flushed_once_when_the_metrics_are_scraped() -> None:
    metrics = Metrics()
    tally = metrics.tally(metrics.reports_received)
    for more, in_all in ((2, 2.0), (1, 3.0), (0, 3.0)):
        tally.count += more
        assert metrics.registry.get_sample_value("flyball_reports_received_total") == in_all


def test_secrets_come_from_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in (("token", "a-secret-of-24-characters"), ("database_url", "mysql://u:p@db/flyball")):
        (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setenv(f"FLYBALL_{name.upper()}_FILE", str(tmp_path / name))
    settings = load_settings()
    assert settings.token.get_secret_value() == "a-secret-of-24-characters"
    assert settings.database_url == "mysql://u:p@db/flyball"
    # Whoever says it more directly wins: first the argument, then the variable.
    assert load_settings(database_url="sqlite:///x").database_url == "sqlite:///x"
    monkeypatch.setenv("FLYBALL_TOKEN", "another-secret-of-the-environment")
    assert load_settings().token.get_secret_value() == "another-secret-of-the-environment"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "it is not text"),
        (b" \n", "is empty"),
        (b"short", "token"),
    ],
)
def test_a_secret_file_that_is_no_use_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    monkeypatch.setenv("FLYBALL_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(ConfigurationError, match=expected) as caught:
        load_settings()
    assert caught.value.hint
