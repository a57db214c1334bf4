"""The how-to about epochs, its script with torchdata: one rank killed in the second epoch, one at its end."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from first_hour.page_runner import fences_of
from support.commands.framework_runs import Place

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "epochs.md"


def test_each_sample_is_trained_once_in_each_epoch(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {fence.title: fence.text for fence in fences_of(PAGE) if fence.title}
    script = place.folder / "train_torchdata.py"
    script.write_text(files["train_torchdata.py"])
    place.killed(script, kills={50: 1, 79: 0}, ranks=2)
    (place.folder / "count_samples.py").write_text(files["count_samples.py"])
    monkeypatch.chdir(place.folder)
    runpy.run_path("count_samples.py")
    assert "each of 320 samples once" in capsys.readouterr().out
