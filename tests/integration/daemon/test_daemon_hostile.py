"""Two jobs on one host. The script of one attacks what it shares with the daemon and the engine; the other loses
nothing: the same processes, steps that go on, saves that are committed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.clocks.waits import until
from support.hosts.daemons import LoneDaemon
from support.jobs.commanded import CommandedJob
from support.servers.played_supervisor import PlayedSupervisor

from flyball.contracts.decisions import StartWorkers, UpdateState
from flyball.contracts.reports.rank_columns import statuses_in

pytestmark = pytest.mark.proof
SCRIPT = Path(__file__).with_name("hostile_worker.py")
ATTACK_S = 2.0
MOST_BYTES = 700 << 20  # of the daemon, or the engine
QUIET = """
import time
import torch
import flyball
job = flyball.attach()
x = torch.zeros(1000)
for step in range(job.restore({"x": x}), 1_000_000):
    x += 1
    job.step(step)
    if step % 5 == 0:
        job.save(step, {"x": x})
    time.sleep(0.05)
"""


def modes() -> list[str]:
    """The keys of the script's ATTACKS."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("no attacks")


class Beside:
    """A host with a quiet job, and what must stay as it is while another job attacks."""

    def __init__(self, daemon: LoneDaemon) -> None:
        self.daemon = daemon
        self.quiet = CommandedJob(daemon, QUIET, name="quiet")
        self.quiet.start()
        until(lambda: self.copied() > 0, "a copy of the quiet job's step")
        self._processes = self.processes()

    def processes(self) -> tuple[int, int, int]:
        newest = self.daemon.supervisor.newest
        assert newest is not None
        [pid] = [r.pid for r in statuses_in(newest.workers, newest.progress) if r.job == "quiet"]
        return self.daemon.pid, self.daemon.engine_pid, pid

    def copied(self) -> int:
        """The newest step of the quiet job that the engine has committed."""
        newest = self.daemon.supervisor.newest
        copies = newest.copies if newest is not None else ()
        return max((copy.step for copy in copies if copy.job == "quiet"), default=-1)

    def check(self) -> None:
        """The quiet job goes on in the same processes, and is saved."""
        assert self.daemon.process is not None
        assert self.daemon.process.poll() is None, self.daemon.log()[-3000:]
        before = self.copied()
        until(lambda: self.copied() > before + 5, "further copies of the quiet job")
        assert self.processes() == self._processes
        for pid in self._processes[:2]:
            assert psutil.Process(pid).memory_info().rss < MOST_BYTES


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    server = PlayedSupervisor()
    daemon = LoneDaemon(tmp_path_factory.mktemp("hostile"), server)
    daemon.start()
    try:
        yield Beside(daemon)
    finally:
        daemon.clean_up()
        server.close()


@pytest.mark.parametrize("mode", modes())
def test_a_hostile_script_harms_its_own_job_only(beside: Beside, mode: str) -> None:
    name = f"hostile-{mode}"
    argv = ("train.py", mode, str(ATTACK_S))
    hostile = CommandedJob(beside.daemon, SCRIPT.read_text(), name=name, argv=argv)
    hostile.start()
    assert hostile.exit_of(0).job == name  # the daemon has seen its end, whatever it left
    beside.check()
    if mode == "next":
        tried = hostile.send(StartWorkers(hostile.spec, hostile.placement(2)), generation=2)
        assert tried.state is UpdateState.FAILED, tried
        beside.check()
    ended = hostile.end(2)
    assert ended.state is UpdateState.SUCCEEDED, ended
    beside.check()
