"""The environment of the other engines: a venv outside the repository, with the same torch as this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from checkpoint_bench.samples import progress

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
