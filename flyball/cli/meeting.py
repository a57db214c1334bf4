"""What hosts need that meet at a rendezvous address, as torchrun's do: a common secret, and a name for each."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from flyball.cli import this_host
from flyball.cli.messages import say
from flyball.cli.places import state_root
from flyball.contracts.errors import ConfigurationError
from flyball.launcher import RunRequest

TRUSTED_VARIABLE = "FLYBALL_TRUSTED_NETWORK"
MAX_NODES_HERE = 64


def common_token(request: RunRequest, environ: Mapping[str, str]) -> str:
    """The secret that all hosts of the job share. Raises ConfigurationError with what to do if there is none."""
    token = environ.get("FLYBALL_TOKEN", "").strip()
    if token:
        return token
    if not request.trusted_network and environ.get(TRUSTED_VARIABLE, "") in ("", "0"):
        raise ConfigurationError(
            "Hosts that meet at a rendezvous address need a common secret.",
            hint=f"run on every host, before the same command: export FLYBALL_TOKEN={secrets.token_hex(16)}   "
            "(one secret for all; or add --trusted-network where everybody on the network may join)",
        )
    host, _, port = request.rendezvous.rpartition(":")
    if not this_host.is_loopback_name(host):
        say(
            f"trusted network: who reaches port {port} and knows the job's name may join, and run programs on its hosts"
        )
    # Not the host: one machine may call it localhost, another by its name
    return "trusted-network-" + hashlib.sha256(f"{request.job}:{port}".encode()).hexdigest()


def claim_host_id(request: RunRequest, environ: Mapping[str, str], stack: ExitStack) -> str:
    """A name for this node: the machine's, with a number where several nodes run on one machine. The lowest that is
    free is taken, for as long as this process lives, so that the same nodes have the same names the next time."""
    if request.host_id:
        return request.host_id
    name = this_host.host_id()
    folder = state_root(environ) / "nodes"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(1, MAX_NODES_HERE + 1):
        candidate = name if number == 1 else f"{name[:60]}-{number}"
        if _lock(folder / candidate, stack):
            return candidate
    raise ConfigurationError(
        f"{MAX_NODES_HERE} nodes of jobs run on this machine already.", hint="name this one with --host-id NAME"
    )


def _lock(file: Path, stack: ExitStack) -> bool:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    stack.callback(os.close, descriptor)
    return True
