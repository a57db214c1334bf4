"""The uninterrupted run that the demo's job is compared with: plain torchrun, which knows nothing of Flyball."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from flyball.contracts.errors import FlyballError, Unreachable

STOP_TIMEOUT_S = 10.0
LOOK_INTERVAL_S = 0.1


def run_reference(
    script: Path,
    arguments: Sequence[str],
    *,
    world_size: int,
    log_file: Path,
    deadline_s: float,
    on_wait: Callable[[], None],
) -> None:
    """Run the script under torchrun to its end. `on_wait` is called often and may raise, which ends the run."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "TORCHELASTIC_"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    deadline = time.monotonic() + deadline_s
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            on_wait()
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"The uninterrupted run did not end within {deadline_s:.0f} s.", hint=f"its log is {log_file}"
                )
            time.sleep(LOOK_INTERVAL_S)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its workers
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                torchrun = psutil.Process(process.pid)
                for member in [*torchrun.children(recursive=True), torchrun]:
                    with suppress(psutil.NoSuchProcess):
                        member.kill()
                process.wait()
    if process.returncode:
        raise FlyballError(
            f"The uninterrupted run under torchrun failed with exit code {process.returncode}.",
            hint=f"its log is {log_file}",
        )
