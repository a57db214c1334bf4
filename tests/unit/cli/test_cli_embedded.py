"""The supervisor inside `flyball run` is restarted at the same address when a part of it fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.clocks.waits import until

from flyball.cli.reach.client import ApiClient
from flyball.cli.run import embedded
from flyball.cli.run.embedded import MAX_RESTARTS, KeptSupervisor
from flyball.cli.run.host_process import is_written
from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import FlyballError, PortInUse


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptSupervisor]:
    supervisor = KeptSupervisor(tmp_path / "supervisor")
    supervisor.start()
    yield supervisor
    supervisor.stop()


def test_a_supervisor_whose_loop_failed_is_restarted_at_its_address(kept: KeptSupervisor) -> None:
    with ApiClient(kept.url, kept.token) as client:
        client.post("/v1/jobs", JobSpec(job="job", argv=("t.py",), workdir="/"))
        first = kept._running
        kept.keep()
        assert kept._running is first is not None
        first._loops[0].failed = True

        def restarted() -> bool:  # its port is still in use for a moment, so it retries
            kept.keep()
            return kept._running not in (first, None)

        until(restarted)
        assert client.get("/v1/jobs/job")["state"] == "submitted"


def test_restarts_are_limited_and_spaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimpleNamespace(now_s=0.0, monotonic=lambda: time.now_s)
    monkeypatch.setattr(embedded, "time", time)
    monkeypatch.setattr(
        embedded,
        "start_supervisor",
        lambda *_a, **_k: SimpleNamespace(
            url="", token="t", failed=True, write_problem=None, stop=lambda: None, on_event=lambda _: None
        ),
    )
    kept = KeptSupervisor(tmp_path)
    kept.start()
    attempts: list[float] = []

    def refuse(*_arguments: object, **_options: object) -> None:
        attempts.append(time.now_s)
        raise PortInUse("Port 7 is in use.")

    monkeypatch.setattr(embedded, "start_supervisor", refuse)
    with pytest.raises(FlyballError, match="given up") as caught:
        while time.now_s < 600.0:
            kept.keep()
            time.now_s += 0.1
    assert "supervisor.log" in caught.value.hint
    assert len(attempts) == MAX_RESTARTS
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(attempts))


@pytest.mark.processes
def test_workers_are_detected_by_the_logs_they_write(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "job"
    (logs / "g2").mkdir(parents=True)
    assert not is_written(logs)
    with (logs / "g2" / "rank0.log").open("wb") as log:
        worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
    try:
        assert is_written(logs)
        assert not is_written(tmp_path / "logs" / "other")
    finally:
        worker.communicate(b"\n", timeout=60.0)
    assert not is_written(logs)
