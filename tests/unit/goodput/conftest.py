"""Event files: where one is, and a rank that no launcher has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyball.sdk.worker_identity import WorkerIdentity, read_identity


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def alone() -> WorkerIdentity:
    return read_identity({"FLYBALL_JOB": "llama"})


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
