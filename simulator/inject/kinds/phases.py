"""Waits until a rank of a host is in a phase, as its beacon says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from flyball.contracts.cluster import Phase
from flyball.contracts.errors import NotFound, StateVersionMismatch, UsageError
from flyball.contracts.on_host.segments import beacon_path
from flyball.sdk.beacon import BeaconReader
from simulator.inject.host_files import HostFiles

PHASE_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 0.001  # a save may block for some milliseconds only
WORKERS_INTERVAL_S = 0.1  # their list is read from a file
NAMES = tuple(phase.name.lower() for phase in Phase)


def phase_of(text: str) -> Phase:
    """Raises UsageError."""
    if text not in NAMES:
        raise UsageError(f"There is no phase {text!r}.", hint=f"phase={'|'.join(NAMES)}")
    return Phase[text.upper()]


def wait_for_phase(files: HostFiles, prefix: str, phase: Phase, *, timeout_s: float = PHASE_TIMEOUT_S) -> None:
    """Until any rank of the host is in the phase, also one that is started meanwhile. Raises NotFound at the deadline.

    `prefix`: of the host's shared memory.
    """
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        readers = list(_readers(files, prefix))
        try:
            look_again_s = time.monotonic() + WORKERS_INTERVAL_S
            while time.monotonic() < look_again_s:
                if any(reader.snapshot().phase is phase for reader in readers):
                    return
                time.sleep(LOOK_INTERVAL_S)
        finally:
            for reader in readers:
                reader.close()
    raise NotFound(
        f"No rank on the host came into the phase {phase.name.lower()} within {timeout_s:.0f} s: nothing was done.",
        hint="restoring and starting come with a restart; checkpoint with a save that waits",
    )


def _readers(files: HostFiles, prefix: str) -> Iterator[BeaconReader]:
    for worker in files.workers():
        path = beacon_path(prefix, worker.job, worker.generation, worker.rank)
        if worker.rank >= 0 and files.process_of(worker) is not None and Path(path).exists():
            try:
                yield BeaconReader(path)
            except (OSError, StateVersionMismatch):
                continue  # removed since, or not yet complete
