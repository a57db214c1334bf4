"""Runs each part of the benchmark in its own process and folder: Flyball's parts, then the other engines.

The other engines have their own venv, outside the repository, with the same torch. This module must not import Flyball
at the top, because their processes import it too.
"""

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

from checkpoint_bench.measure import Options, progress

FLYBALL_PARTS = ("blocking", "lost", "interference", "durable", "peer", "restore_memory", "restore_disk", "extra")
PART_TIMEOUT_S = 900.0
_END_TIMEOUT_S = 60.0
_ERROR_LINES = 12


class PartFailed(Exception):
    """A part ended without a result; the message is the end of its stderr."""


def measure_flyball(names: list[str], state_bytes: int, repeats: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return each part's result; {"failed": reason} if it could not be measured."""
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
    """Run one part and return its JSON object. Pass its stderr on to ours."""
    from host_daemon.workers.worker_environment import COPY_PAST_CACHES

    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="p-", dir=folder) as own:
        arguments = Options(state_bytes, repeats, Path(own)).arguments()
        process = subprocess.Popen(
            [str(python), "-m", module, name, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"GLIBC_TUNABLES": COPY_PAST_CACHES, **os.environ},  # as for workers; floors and peers too
            text=True,
        )
        assert process.stderr is not None
        assert process.stdout is not None
        errors: list[str] = []
        try:
            output = _collect(process, errors, timeout_s)
        finally:
            if process.poll() is None:  # SIGINT, so that it stops its own processes
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(_END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    if process.returncode != 0:
        raise PartFailed("\n".join(errors[-_ERROR_LINES:]) or f"exited with {process.returncode}")
    try:
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise PartFailed(f"its result does not parse: {error}") from error
    result["part_s"] = round(time.monotonic() - began_s, 1)
    return result


def _collect(process: subprocess.Popen[str], errors: list[str], timeout_s: float) -> str:
    """Return its stdout; pass its stderr on as it arrives."""

    def relay() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            errors.append(line.rstrip())
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


PEERS = (
    "torch.save",
    "safetensors",
    "dcp.save",
    "dcp.async_save-thread",
    "dcp.async_save-thread-reused",  # its stager keeps its buffers between saves
    "dcp.async_save-thread-pinned",
    "dcp.async_save-process",
    "dcp.async_save-process-shared",  # a reused stager in shared memory
    "dcp.async_save-process-pinned",
    "dlrover",
    "nvidia-local",
    "nvidia-async",
    "torchsnapshot",
)


PEER_TIMEOUT_S = 400.0


def measure_peers(
    python: Path, names: list[str], state_bytes: int, repeats: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """Return each engine's result; {"failed": reason} if it could not run."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        progress(f"--- {name}, {state_bytes / 2**30:g} GiB")
        try:
            found[name] = run_part(
                python, "checkpoint_bench.peer_worker", name, state_bytes, repeats, folder, PEER_TIMEOUT_S
            )
        except PartFailed as error:
            progress(f"{name} could not be measured:\n{error}")
            found[name] = {"failed": str(error).splitlines()[-1][:500]}
    return found


# dlrover imports grpcio, but its extra `torch` does not require it.
REQUIREMENTS = ("dlrover[torch]", "grpcio", "nvidia-resiliency-ext", "torchsnapshot")
_INSTALL_TIMEOUT_S = 1800.0


def prepare_venv(folder: Path, root: Path) -> Path:
    """Install missing packages into the venv, torch pinned by constraints.txt, and return its python.

    If an engine cannot be installed, its adapter fails to import it and reports that.
    """
    folder = folder.resolve()
    if folder.is_relative_to(root):
        raise SystemExit(f"checkpoint: --peers-venv {folder} is inside the repository; give a folder outside it")
    python = folder / "bin" / "python"
    if not python.exists():
        progress(f"making {folder}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = root / "constraints.txt"
    pinned = next(line for line in constraints.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    _install(python, constraints, [pinned, "numpy", "safetensors"], required=True)
    for requirement in REQUIREMENTS:  # one by one, so that a failure blocks no other
        _install(python, constraints, [pinned, requirement], required=False)
    return python


def _install(python: Path, constraints: Path, packages: list[str], *, required: bool) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints), *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    if done.returncode == 0:
        return
    reason = "\n".join(done.stderr.strip().splitlines()[-5:])
    if required:
        raise SystemExit(f"checkpoint: {', '.join(packages)} could not be installed:\n{reason}")
    progress(f"{packages[-1]} could not be installed:\n{reason}")
