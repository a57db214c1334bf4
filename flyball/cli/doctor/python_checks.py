"""What `flyball doctor` says about Python and PyTorch."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec

from flyball import __version__
from flyball.cli.doctor.findings import CheckedHost, Finding, ok, warning
from flyball.contracts.errors import ConfigurationError, Unreachable
from flyball.contracts.wire import MALFORMED, decoder_of

IMPORT_TIMEOUT_S: Final = 90.0  # from a cold network file system
_CUDA_BUILD: Final = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
_PROGRAM: Final = (
    "import json, torch, torch.distributed as d\n"
    "print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda or torch.version.hip or '',"
    " gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,"
    " backends=[b for b in ('gloo', 'nccl', 'mpi') if d.is_available() and getattr(d, f'is_{b}_available')()])))"
)


class TorchFacts(msgspec.Struct, frozen=True):
    """What torch says about itself."""

    version: str
    cuda: str  # '': built without
    gpus: int  # that it can use
    backends: tuple[str, ...]


def python(_: CheckedHost) -> Iterator[Finding]:
    """The versions."""
    try:
        torch = version("torch")
    except PackageNotFoundError as error:
        raise ConfigurationError("PyTorch is not installed in this environment.", hint="pip install torch") from error
    yield ok("python", f"Python {platform.python_version()}, PyTorch {torch}, Flyball {__version__}")


def torch(host: CheckedHost, program: Sequence[str] = (sys.executable, "-c", _PROGRAM)) -> Iterator[Finding]:
    """Import it, in a process of its own, as a worker does. `program` prints TorchFacts as JSON."""
    try:
        done = subprocess.run(
            program, env=dict(host.environ), capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        hint = f"time {sys.executable} -c 'import torch'; a local disk instead of a network file system is faster"
        raise Unreachable(f"`import torch` takes longer than {IMPORT_TIMEOUT_S:g} s.", hint=hint) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigurationError(f"`import torch` fails: {lines[-1]}", hint="pip install --force-reinstall torch")
    facts = next(filter(None, map(_facts_in, reversed(done.stdout.splitlines()))), None)
    if facts is None:
        raise ConfigurationError("`import torch` ends the process early.", hint=f"{sys.executable} -c 'import torch'")
    yield torch_finding(facts, host)


def _facts_in(line: str) -> TorchFacts | None:
    """None for what libraries print at their import, or at the exit."""
    try:
        return decoder_of(TorchFacts).decode(line)
    except MALFORMED:
        return None


def torch_finding(facts: TorchFacts, host: CheckedHost) -> Finding:
    """Whether it can use the GPUs that are there, and has what data-parallel training needs."""
    backends = ", ".join(facts.backends)
    if host.has_nvidia_gpu and not facts.gpus:
        if not facts.cuda:
            return warning("torch", f"PyTorch {facts.version} was built without CUDA; this host has GPUs", _CUDA_BUILD)
        mend = "nvidia-smi; install a newer driver, or a PyTorch for an older CUDA; see CUDA_VISIBLE_DEVICES"
        return warning("torch", f"PyTorch {facts.version} for CUDA {facts.cuda} can use none of this host's GPUs", mend)
    if "gloo" not in facts.backends:
        return warning("torch", f"PyTorch {facts.version} has no gloo backend", "pip install --force-reinstall torch")
    gpus = "1 GPU" if facts.gpus == 1 else f"{facts.gpus or 'no'} GPUs"
    return ok("torch", f"can be imported; {gpus}; backends {backends}")
