"""Runs parts of the benchmark in processes of their own, each with a folder of its own that is removed afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from checkpoint_bench.options import Options
from checkpoint_bench.samples import progress
from host_daemon.workers.worker_environment import COPY_PAST_CACHES

FLYBALL_PARTS = ("blocking", "lost", "interference", "durable", "peer", "restore_memory", "restore_disk", "extra")
PART_TIMEOUT_S = 900.0
_END_TIMEOUT_S = 60.0
_ERROR_LINES = 12


class PartFailed(Exception):
    """A part ended without a result; the message is the end of what it wrote."""


def measure_flyball(names: list[str], state_bytes: int, repeats: int, folder: Path) -> dict[str, dict[str, Any]]:
    """What each part found; {"failed": reason} for one that could not be measured."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        progress(f"--- {name}, {state_bytes / 2**30:g} GiB")
        try:
            found[name] = run_part(Path(sys.executable), "checkpoint_bench.figures", name, state_bytes, repeats, folder)
        except PartFailed as error:
            progress(f"{name} failed:\n{error}")
            found[name] = {"failed": str(error)}
    return found


def run_part(
    python: Path,
    module: str,
    name: str,
    state_bytes: int,
    repeats: int,
    folder: Path,
    timeout_s: float = PART_TIMEOUT_S,
) -> dict[str, Any]:
    """Run one part and return its JSON object. Its stderr goes on to ours."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="p-", dir=folder) as own:
        arguments = Options(state_bytes, repeats, Path(own)).arguments()
        process = subprocess.Popen(
            [str(python), "-m", module, name, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"GLIBC_TUNABLES": COPY_PAST_CACHES, **os.environ},  # as workers have it; floors and peers too
            text=True,
        )
        assert process.stderr is not None
        assert process.stdout is not None
        said: list[str] = []
        try:
            output = _collect(process, said, timeout_s)
        finally:
            if process.poll() is None:  # SIGINT, so that it ends what it started
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(_END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    if process.returncode != 0:
        raise PartFailed("\n".join(said[-_ERROR_LINES:]) or f"it ended with {process.returncode}")
    try:
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise PartFailed(f"its result does not parse: {error}") from error
    result["part_s"] = round(time.monotonic() - began_s, 1)
    return result


def _collect(process: subprocess.Popen[str], said: list[str], timeout_s: float) -> str:
    """Its stdout; passes its progress on as it comes."""

    def relay() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line.rstrip())
            sys.stderr.write(line)

    reader = threading.Thread(target=relay, daemon=True)
    reader.start()
    expired = threading.Timer(timeout_s, lambda: process.send_signal(signal.SIGINT))
    expired.start()
    try:
        assert process.stdout is not None
        output = process.stdout.read()
        process.wait(timeout_s)
    finally:
        expired.cancel()
    reader.join(_END_TIMEOUT_S)
    return output
