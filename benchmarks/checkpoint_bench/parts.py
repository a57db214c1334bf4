"""Runs each part of the benchmark in a process and a folder of its own: Flyball's parts, then the other engines.

The other engines live in a venv of their own, outside the repository, with the same torch. Nothing at the top of this
file imports Flyball: their processes import it too.
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
    from host_daemon.workers.worker_environment import COPY_PAST_CACHES

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


PEERS = (
    "torch.save",
    "safetensors",
    "dcp.save",
    "dcp.async_save-thread",
    "dcp.async_save-thread-reused",  # a stager that keeps its buffers from save to save
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
    """What each engine found; {"failed": reason} where it could not be run."""
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


# grpcio: dlrover imports it, and its extra `torch` does not name it.
REQUIREMENTS = ("dlrover[torch]", "grpcio", "nvidia-resiliency-ext", "torchsnapshot")
_INSTALL_TIMEOUT_S = 1800.0


def prepare_venv(folder: Path, root: Path) -> Path:
    """The venv's python. What is missing is installed, torch pinned by constraints.txt; what cannot be installed is
    said by its adapter, which then cannot import it."""
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
    for requirement in REQUIREMENTS:  # one by one, so that one that does not install keeps no other out
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
