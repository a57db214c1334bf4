"""Names of the shared-memory files of a host. Pure: whoever creates or removes them does it by these names."""

from __future__ import annotations

import posixpath

import xxhash

DEFAULT_SHM_DIR = "/dev/shm"
SHM_DIR_VARIABLE = "FLYBALL_SHM_DIR"  # replaces /dev/shm, for tests and for hosts with a tmpfs of their own

CONTROL_SUFFIX = ".ctl"
SLOT_SUFFIXES = (".s0", ".s1")


def shm_prefix(state_dir: str, shm_dir: str = DEFAULT_SHM_DIR) -> str:
    """The path prefix of every segment of the daemon and engine whose state lives in `state_dir`.

    `state_dir` must be resolved (absolute, no symbolic links): two spellings of one folder would give two prefixes.
    """
    key = xxhash.xxh3_128_hexdigest(state_dir.encode())[:10]
    return posixpath.join(shm_dir, f"flyball-{key}")


def rank_segment(prefix: str, job: str, rank: int) -> str:
    """Base path of a rank's own slots; CONTROL_SUFFIX and SLOT_SUFFIXES are appended to it."""
    return f"{prefix}.{job}.r{rank}"


def replica_segment(prefix: str, job: str, rank: int) -> str:
    """Base path of the slots in which this host keeps the shards of another host's rank."""
    return f"{prefix}.{job}.p{rank}"


def beacon_path(prefix: str, job: str, generation: int, rank: int) -> str:
    """The beacon of one rank in one generation."""
    return f"{prefix}.{job}.g{generation}.r{rank}.beacon"
