"""What many unit tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs.rank_alone import rank_alone
from support.policy.golden import (  # noqa: F401 - hooks
    pytest_pycollect_makeitem,
    pytest_runtest_call,
    pytest_sessionfinish,
)

from flyball.sdk.worker_identity import WorkerIdentity


@pytest.fixture
def lone_rank(tmp_path: Path) -> WorkerIdentity:
    """A rank without others that commits for itself: it has slots, and no engine."""
    return rank_alone(str(tmp_path / "flyball-test"))


@pytest.fixture
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit or an event that a busy machine holds up is awaited when a job is closed, and not given up."""
    monkeypatch.setattr("ckpt_engine.trainer.commit_link._CLOSE_TIMEOUT_S", 120.0)
    monkeypatch.setattr("flyball.sdk.event_file._JOIN_S", 120.0)
    monkeypatch.setattr("flyball.sdk.event_file._LOCK_WAIT_S", 120.0)
