"""docs/reference/configuration.md lists every setting, its default and what it means."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ckpt_engine.settings import EngineSettings
from flyball.cli.commands import as_click
from flyball.cli.describe_settings import OF_THEIR_OWN, described, page
from flyball.contracts.checkpoints import CheckpointSpec
from host_daemon.settings import URL_FLAGS, VALUE_FLAGS
from services.controller.round.view import PolicySettings
from services.record.retention_rules import RetentionSettings
from services.sensor.detector.fault_detector import DetectorSettings
from services.sensor.detector.patience import PhasePatience, StallSettings
from services.sensor.detector.watched_host import SilenceSettings
from services.settings import Settings

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"
STRUCTS = (
    *(PolicySettings, DetectorSettings, SilenceSettings, StallSettings, PhasePatience),
    *(RetentionSettings, CheckpointSpec, EngineSettings),
)


def test_the_page_is_what_the_settings_say() -> None:
    assert PAGE.read_text() == page(), "python -m flyball.cli.describe_settings > docs/reference/configuration.md"


def test_every_setting_is_a_row_of_its_table() -> None:
    rows = re.findall(r"^\| `(?:--)?([\w-]+)` \|", PAGE.read_text(), re.MULTILINE)
    supervisor = [name for name in Settings.model_fields if name not in OF_THEIR_OWN]
    structs = [field.name for kind in STRUCTS for field in msgspec.structs.fields(kind)]
    daemon = [name for name, _ in (*URL_FLAGS, *VALUE_FLAGS)]
    assert sorted(rows) == sorted([*supervisor, *structs, *daemon])


@pytest.mark.parametrize("kind", [Settings, *STRUCTS], ids=lambda kind: kind.__name__)
def test_every_setting_says_what_it_means(kind: type) -> None:
    """In the comment beside it, or above it."""
    fields = Settings.model_fields if kind is Settings else kind.__struct_fields__  # type: ignore[attr-defined]
    meanings = described(kind)
    assert [name for name in fields if len(meanings[name]) < 4] == []


def test_a_comment_beside_a_field_comes_before_one_above_it() -> None:
    found = described(PolicySettings)
    assert found["grow_after_s"] == "a host must have been free and well for this long"
    assert described(CheckpointSpec)["replication"].startswith("How they are chosen.")
    assert "Assumed for expected costs" not in found["assumed_restart_s"]


@pytest.mark.parametrize("name", ["up", "host"])
def test_a_default_of_a_flag_gives_way_to_the_settings_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These commands hand their flags on: a default of their own would stand above the variable."""
    command = as_click().commands[name]
    settings = {*Settings.model_fields, *(flag.replace("-", "_") for flag, _ in VALUE_FLAGS)}
    with_default = [one for one in command.params if one.name in settings and one.default]
    assert len(with_default) == 2
    for number, parameter in enumerate(with_default):
        monkeypatch.setenv(f"FLYBALL_{parameter.name.upper()}", f"{number + 4}")
    given = command.make_context(name, []).params
    assert [f"{given[one.name]:g}" if one.name != "host" else given[one.name] for one in with_default] == ["4", "5"]
