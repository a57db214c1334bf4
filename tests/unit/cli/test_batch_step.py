"""Who obeys SIGTERM in a step of a batch system, and how long there is until its SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.clocks.waits import until

from flyball.batch_step import DEFAULT_NOTICE_S, OBEYS, is_batch_step, lead_step, leader_of, notice_s
from flyball.cli.signals import EndSignals
from flyball.contracts.errors import UsageError
from flyball.launch.launcher import parse_run
from host_daemon.kernel.processes import ignores_signal

NOW = 1_800_000_000.0


def test_a_step_is_known_by_its_variables() -> None:
    assert not is_batch_step({}) and not is_batch_step({"SLURM_JOB_ID": ""})
    assert not is_batch_step({"JOB_ID": "llama"}), "people name their runs by it"
    assert is_batch_step({"SLURM_JOB_ID": "7"}) and is_batch_step({"PBS_JOBID": "7.host"})
    environ = {OBEYS: "no number"}
    assert leader_of({}) == leader_of(environ) == 0
    lead_step(environ)
    assert leader_of(environ) == os.getpid()


@pytest.mark.parametrize(
    ("ends_at", "notice"),
    [
        ("", DEFAULT_NOTICE_S),
        ("soon", DEFAULT_NOTICE_S),
        (f"{NOW + 60:.0f}", 60.0 + DEFAULT_NOTICE_S),  # a warning before the end: --signal=TERM@60
        (f"{NOW - 1:.0f}", DEFAULT_NOTICE_S),  # its time is up
        (f"{NOW + 1_800:.0f}", DEFAULT_NOTICE_S),  # cancelled before
    ],
)
def test_slurm_says_when_its_job_ends(ends_at: str, notice: float) -> None:
    assert notice_s({"SLURM_JOB_END_TIME": ends_at}, NOW) == notice


def test_sigterm_that_is_repeated_hurries_nothing() -> None:
    with EndSignals(("SIGTERM", "SIGINT"), lambda: 60.0) as signals:
        assert signals.left_s == float("inf")
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.count, signals.exit_code) == (1, 143)
        assert 50.0 < signals.left_s <= 60.0
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.count == 2, "a person is in a hurry"
    with EndSignals(("SIGTERM",)) as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.count, signals.left_s) == (2, float("inf"))


def test_the_flags() -> None:
    def parsed(*flags: str) -> tuple[bool, float]:
        request = parse_run([*flags, "train.py"], {})
        return request.batch, request.notice_s

    assert parsed() == (False, 0.0)
    assert parsed("--batch") == (True, 0.0)
    assert parsed("--notice-s", "90") == (True, 90.0)
    for wrong in ("1", "inf", "nan", "1e9"):
        with pytest.raises(UsageError, match="--notice-s"):
            parsed("--notice-s", wrong)


OBEYS_ONE = """
import os, sys, threading
from flyball.batch_step import block_term, take_term
block_term()
took = threading.Event()
take_term(int(sys.argv[1]).__eq__, took.set, lambda: print("seen", flush=True))
print("ready", flush=True)
took.wait()
"""


@pytest.mark.processes
def test_a_process_obeys_its_leader_alone(tmp_path: Path) -> None:
    """Also what the kernel sends in the name of a leader that died."""
    obeying = subprocess.Popen([sys.executable, "-c", OBEYS_ONE, str(os.getpid())], stdout=subprocess.PIPE, text=True)
    try:
        assert obeying.stdout is not None and obeying.stdout.readline() == "ready\n"
        stranger = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGTERM)"
        subprocess.run([sys.executable, "-c", stranger, str(obeying.pid)], check=True)
        assert obeying.stdout.readline() == "seen\n" and obeying.poll() is None
        obeying.terminate()
        assert obeying.wait(60) == 0
    finally:
        obeying.kill()
        obeying.wait()


@pytest.mark.processes
def test_whether_a_process_ignores_a_signal_is_seen_from_outside() -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    for argv, ignores in (([sys.executable, "-c", code], True), (["cat"], False)):
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            if ignores:
                assert process.stdout is not None
                process.stdout.readline()
            until(lambda pid=process.pid, is_so=ignores: ignores_signal(pid, signal.SIGTERM) is is_so, "its signals")
        finally:
            process.kill()
            process.wait()
    assert not ignores_signal(process.pid, signal.SIGTERM), "it is gone"
