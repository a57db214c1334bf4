"""What the daemon asks of a GPU: NVML, whether processes keep it busy, the check of a host; and `flyball doctor`."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.clocks.waits import until
from support.commands.run_folders import environment_of

from flyball.contracts.cluster import Activity
from flyball.contracts.decisions import CheckHost, CommandResult
from flyball.contracts.error_classes import ErrorClass, classify
from host_daemon.checks.host_check import HostChecker
from host_daemon.kernel.activity import WINDOW_S, ActivityWatch, StalledWorker
from host_daemon.kernel.free_ports import FreePorts
from host_daemon.kernel.reaper import Reaper
from host_daemon.probes.gpu_use import GpuUse
from host_daemon.probes.gpus import Gpus

DEADLINE_S = 120.0


def test_nvml_is_read() -> None:
    probe = Gpus(None, time.monotonic)
    assert not [found for found in probe.read().states if found.kind == "gpu-lost"]
    nvml = probe._open()
    gpus = [probe._look(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    assert len(gpus) >= torch.cuda.device_count()
    for gpu in gpus:
        assert gpu is not None and not gpu.is_lost
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", gpu.name)
        assert gpu.celsius is not None and 10 < gpu.celsius < 110
        print(gpu)


@contextmanager
def process(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed its first line."""
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None and started.stdout.readline() == "ready\n"
        yield started
    finally:
        started.kill()
        started.wait(DEADLINE_S)


HOLDS = "import time, torch; torch.ones(9, device='cuda').sum().item(); print('ready', flush=True); time.sleep(600)"
SPINS = (
    "import torch; end = torch.cuda.Event(blocking=True); torch.cuda._sleep(1 << 40); end.record()\n"
    "print('ready', flush=True); end.synchronize()"
)


def becomes(pid: int, activity: Activity) -> None:
    """Wait until the process is seen to do this. It is watched for WINDOW_S before it counts as idle."""
    watch, worker = ActivityWatch(GpuUse().busy), StalledWorker(("job", 1, 0), pid)

    def is_seen() -> bool:
        return watch.look([worker], time.monotonic())[worker.key].activity is activity

    until(is_seen, f"that it is {activity.value}", timeout_s=4 * WINDOW_S)


def test_a_process_whose_gpu_computes_is_active_and_one_that_only_holds_a_gpu_is_idle() -> None:
    with process(HOLDS) as idle:
        becomes(idle.pid, Activity.IDLE)
    with process(SPINS) as spinning:
        becomes(spinning.pid, Activity.ACTIVE)


def test_the_check_of_a_host_multiplies_and_adds_up_on_its_gpus(tmp_path: Path) -> None:
    async def check() -> CommandResult:
        reaper, ports = Reaper(), FreePorts()
        reaper.start()
        try:
            (tmp_path / "a").mkdir()
            order = CheckHost("", "act-1.1.0", 1, ("a",), "127.0.0.1", ports.find(), DEADLINE_S)
            return await HostChecker("a", tmp_path / "a", reaper, ports).check(order, resumed=False)
        finally:
            reaper.stop()

    found = asyncio.run(check()).check
    assert found is not None and found.failed is None, found
    assert found.devices == torch.cuda.device_count()
    assert 0.0 < found.matmul_s < 1.0 and found.all_reduce_s > 0.0
    print(found)


def test_the_doctor_sees_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "flyball.cli.main", "doctor", "torch", "probes", "-o", "json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment_of(tmp_path),
    )
    print(done.stdout)
    lines = {found["subject"]: found for found in json.loads(done.stdout)["findings"]}
    count = torch.cuda.device_count()
    assert lines["torch"]["level"] == "ok", done.stdout
    assert f"{count} GPU{'s' if count > 1 else ''}; backends gloo, nccl" in lines["torch"]["detail"], done.stdout
    assert lines["probe gpu"]["level"] == "ok", done.stdout


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("torch.empty(1 << 42, dtype=torch.uint8, device='cuda')", ErrorClass.GPU_OUT_OF_MEMORY),
        ("torch.zeros(9, device='cuda')[torch.tensor([99], device='cuda')].cpu()", ErrorClass.DEVICE_ASSERT),
        ("torch.ones(9, device='cuda:63')", ErrorClass.CUDA_ERROR),
    ],
)
def test_errors_of_a_gpu_have_a_class_of_their_own(program: str, expected: ErrorClass) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import torch\n{program}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    last = next(line for line in reversed(done.stderr.splitlines()) if re.match(r"[\w.]+(Error|Exception)\b", line))
    kind, _, message = last.partition(": ")
    found = classify(exit_code=1, signal_number=None, kind=kind, message=message, traceback=done.stderr)
    assert found is expected, done.stderr
