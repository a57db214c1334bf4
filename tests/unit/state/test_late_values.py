"""A value that cannot be saved and appears late: a failed save, and no end of a healthy job."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_engine.contracts.notices import Notice, SaveAborted
from flyball.contracts import wire
from flyball.contracts.errors import UnsupportedState
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

GOOD, BAD = {"n": {"late": 1}}, {"n": {"late": object()}}


def test_only_before_the_first_save_it_is_the_jobs_own_mistake(lone_rank: WorkerIdentity, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as engine:
        engine.bind(str(tmp_path / "notify.sock"))
        engine.settimeout(60.0)
        identity = replace(lone_rank, engine_notify=str(tmp_path / "notify.sock"))
        job = Job(identity)
        with pytest.raises(UnsupportedState, match=r"'n.late' is a builtins.object"):
            job.save(0, BAD)
        assert not job.save(1, GOOD).error
        handle = job.save(2, BAD)
        assert "'n.late' is a builtins.object" in handle.error and job.failed_saves == 2
        job.close()
        notices = []
        while len(notices) < 2 or not isinstance(notices[-1], SaveAborted):
            notices.append(wire.decode(engine.recv(4096), Notice))  # type: ignore[arg-type]
        assert [n.step for n in notices if isinstance(n, SaveAborted)] == [0, 2]
        assert "'n.late'" in notices[-1].message
        again = Job(replace(identity, generation=2, restore_step=1))
        assert again.save(4, BAD).error, "a job that was restored is healthy too"
        again.close()
