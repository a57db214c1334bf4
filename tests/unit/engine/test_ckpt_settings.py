"""Checkpoint settings: their sources, and their error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.settings import check_variables, load_settings, read_config
from flyball.contracts.checkpoints import CheckpointSpec, WhenFull
from flyball.contracts.errors import ConfigurationError, FlyballError, UsageError
from flyball.launch.launcher import RunRequest, parse_run
from flyball.layered_settings import parse_size

FILE = """
[checkpoint]
every_s = 10
when_full = "skip"
disk_dir = "/from/file"
disk_every_s = 60

[engine]
memory_limit_bytes = "2 GiB"
disk_bytes_per_s = "100MB"
ping_interval_s = 0.25
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "ckpt.toml"
    path.write_text(FILE)
    return str(path)


def run(line: str, **environ: str) -> RunRequest:
    return parse_run([*line.split(), "train.py"], environ, read_config)


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(file: str) -> None:
    spec = run("").checkpoint
    assert spec == CheckpointSpec()
    spec = run(f"--ckpt-config {file}").checkpoint
    assert (spec.every_s, spec.when_full, spec.disk_dir, spec.disk_every_s) == (10.0, WhenFull.SKIP, "/from/file", 60)
    variables = {"FLYBALL_CKPT_EVERY_S": "20", "FLYBALL_CKPT_RAISE_ON_FAILURE": "on"}
    spec = run("--ckpt-when-full wait", FLYBALL_CKPT_CONFIG=file, **variables).checkpoint
    assert (spec.every_s, spec.when_full, spec.raise_on_failure) == (20.0, WhenFull.WAIT, True)
    assert run(f"--ckpt-config {file} --ckpt-every-s 30", **variables).checkpoint.every_s == 30.0


def test_host_settings_are_passed_to_its_engine(file: str) -> None:
    given = run(f"--ckpt-config {file} --ckpt-memory-limit 3GiB --peer-bandwidth 1GB").engine_environment
    assert given["FLYBALL_CKPT_CONFIG"] == file
    settings = load_settings(given)
    assert settings.memory_limit_bytes == 3 << 30
    assert (settings.peer_bytes_per_s, settings.disk_bytes_per_s) == (10**9, 10**8)
    assert settings.ping_interval_s == 0.25
    assert run("").engine_environment == {}


def test_transoms_settings_are_used_unless_ours_are_given() -> None:
    theirs = {"CKPT_ENGINE_MEM_LIMIT_GB": "10", "CKPT_ENGINE_SKIP_BOOTSTRAP": "on"}
    settings = load_settings(run("", **theirs).engine_environment)
    assert (settings.memory_limit_bytes, settings.refill) == (10 << 30, False)
    request = run("--ckpt-memory-limit 1GiB", FLYBALL_CKPT_REFILL="true", **theirs)
    assert load_settings(request.engine_environment).memory_limit_bytes == 1 << 30
    assert "FLYBALL_CKPT_REFILL" not in request.engine_environment
    assert all(" not used: " in notice for notice in request.notices)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("1.5 MiB", 3 << 19),
        ("200MB", 200_000_000),
        ("1kB/s", 1000),
        ("2k", 2000),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("--ckpt-memory-limit lots", {}, "--ckpt-memory-limit lots"),
        ("--ckpt-when-full sometimes", {}, "--ckpt-when-full sometimes"),
        ("--ckpt-every-s -1", {}, "--ckpt-every-s -1"),
        ("", {"FLYBALL_CKPT_EVERY_S": "soon"}, "FLYBALL_CKPT_EVERY_S"),
        ("", {"FLYBALL_CKPT_MEMORY_LIMIT_BYTES": "-1"}, "FLYBALL_CKPT_MEMORY_LIMIT_BYTES"),
        ("", {"FLYBALL_CKPT_MEMORY_LIMIT_BYTES": "9" * 400}, "FLYBALL_CKPT_MEMORY_LIMIT_BYTES"),
        ("", {"FLYBALL_CKPT_SAVE_TIMEOUT_S": "inf"}, "FLYBALL_CKPT_SAVE_TIMEOUT_S"),
        ("", {"FLYBALL_CKPT_RESTORE_TIMEOUT_S": "nan"}, "FLYBALL_CKPT_RESTORE_TIMEOUT_S"),
        ("", {"FLYBALL_CKPT_EVRY_S": "1"}, "FLYBALL_CKPT_EVRY_S"),
        ("--ckpt-config /no/such/file", {}, "/no/such/file"),
        ("", {"FLYBALL_CKPT_DISK_EVERY_S": "9"}, "needs a folder"),
    ],
)
def test_an_error_names_the_setting_and_the_next_step(line: str, environ: dict[str, str], expected: str) -> None:
    with pytest.raises(FlyballError) as caught:
        run(line, **environ)
    assert isinstance(caught.value, UsageError | ConfigurationError)
    assert expected in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[engine]\nmemory = 1", "memory"),
        ("[engine]\nhuge_pages = 3", "huge_pages"),
        ("[motor]\nx = 1", "motor"),
        ("every_s = 1", "every_s"),
        ("[engine", "not valid TOML"),
        ("x = '\xff'", "not valid TOML"),
        ("x = " + "[" * 100_000, "not valid TOML"),
        ("[engine]\nmemory_limit_bytes = 'much'", "memory_limit_bytes"),
    ],
)
def test_an_error_in_the_file_names_the_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "ckpt.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError) as caught:
        load_settings({"FLYBALL_CKPT_CONFIG": str(path)})
    assert expected in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_misspelt_variable_gets_a_suggestion() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_variables({"FLYBALL_CKPT_MEMORY_LIMIT_BYTE": "1"})
    assert "FLYBALL_CKPT_MEMORY_LIMIT_BYTES" in caught.value.hint
