"""A job has ended when its workers are gone. Until then it is stopping, has its hosts, and is not started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clocks.waits import until
from support.commands.own_processes import is_running

from flyball.contracts.errors import Conflict

SAVES_AT_ITS_END = """
import os, signal, sys, time
def save(*_):
    while not os.path.exists("may_end"):
        time.sleep(0.02)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open("pid", "w").write(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


def test_a_job_is_stopping_until_its_workers_are_gone(make_stack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(SAVES_AT_ITS_END)
    stack = make_stack()
    stack.start_supervisor()
    stack.add_hosts("host-a")
    spec = {"job": "slow", "argv": ["train.py"], "workdir": str(tmp_path), "stop_grace_s": 60.0}
    stack.api.post("/v1/jobs", spec)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the worker")
    pid = int((tmp_path / "pid").read_text())

    def job() -> dict[str, object]:
        return dict(stack.api.get("/v1/jobs/slow"))

    stack.api.post("/v1/jobs/slow/stop")
    until(lambda: job()["state"] == "stopping", "the decision")
    host = stack.api.get("/v1/hosts/host-a")
    assert host["job"] == "slow" and is_running(pid) and not job()["ended_at"]
    with pytest.raises(Conflict, match="still run"):
        stack.api.post("/v1/jobs?again=resume", spec)
    (tmp_path / "may_end").touch()
    until(lambda: job()["state"] == "stopped", "the end")
    assert not is_running(pid) and job()["ended_at"]
    until(lambda: not stack.api.get("/v1/hosts/host-a")["job"], "a free host")
