"""Names of a host's shared-memory files. Pure: everything that creates or removes them uses these names."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

import xxhash

DEFAULT_SHM_DIR = "/dev/shm"
SHM_DIR_VARIABLE = "FLYBALL_SHM_DIR"  # replaces /dev/shm, for tests and for hosts with a tmpfs of their own

CONTROL_SUFFIX = ".ctl"
SLOT_SUFFIXES = (".s0", ".s1", ".s2", ".s3")

# Matched from the end: a job's name may contain dots, and look like any of the parts that follow it.
_SEGMENT = re.compile(
    r"(?P<job>.+)\.(?P<kind>[rp])(?P<rank>[0-9]+)(?P<suffix>\.ctl|\.s[0-3])(?:\.new\.(?P<maker>[0-9]+))?"
)


def shm_prefix(state_dir: str, shm_dir: str = DEFAULT_SHM_DIR) -> str:
    """The path prefix of every segment of the daemon and engine with this state folder.

    `state_dir` must be resolved (absolute, no symbolic links): two spellings of one folder would give two prefixes.
    """
    key = xxhash.xxh3_128_hexdigest(state_dir.encode(errors="surrogateescape"))[:10]
    return posixpath.join(shm_dir, f"flyball-{key}")


def rank_segment(prefix: str, job: str, rank: int) -> str:
    """Base path of a rank's own slots; append CONTROL_SUFFIX or one of SLOT_SUFFIXES."""
    return f"{prefix}.{job}.r{rank}"


def replica_segment(prefix: str, job: str, rank: int) -> str:
    """Base path of the slots in which this host stores the shards of another host's rank."""
    return f"{prefix}.{job}.p{rank}"


def beacon_path(prefix: str, job: str, generation: int, rank: int) -> str:
    """The beacon of one rank in one generation."""
    return f"{prefix}.{job}.g{generation}.r{rank}.beacon"


STACKS_SUFFIX = ".stacks"  # appended to a beacon's path: where its worker writes its Python stacks on request

RESTORE_FOLDER_SUFFIX = ".restore"
_RESTORE_FOLDER = re.compile(r"(?P<job>.+)\.g[0-9]+\.[a-z0-9_]+" + re.escape(RESTORE_FOLDER_SUFFIX))


def restore_folder(prefix: str, job: str, generation: int) -> str:
    """The beginning of the path of a folder in which a generation restores a step; its maker adds what is its own, and
    RESTORE_FOLDER_SUFFIX."""
    return f"{prefix}.{job}.g{generation}."


def job_of_restore_folder(prefix: str, file_name: str) -> str | None:
    """The job that such a folder belongs to. None for another state folder's, and for other names."""
    head = posixpath.basename(prefix) + "."
    match = _RESTORE_FOLDER.fullmatch(file_name.removeprefix(head)) if file_name.startswith(head) else None
    return match["job"] if match else None


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """The parts of a segment's file name."""

    job: str
    replica: bool  # of another host's rank
    rank: int
    suffix: str
    maker_pid: int = 0  # of a file still being created; 0 if complete

    def base(self, prefix: str) -> str:
        """The base path it was built from."""
        return (replica_segment if self.replica else rank_segment)(prefix, self.job, self.rank)


def parse_segment(prefix: str, file_name: str) -> SegmentName | None:
    """Parse a file name in the folder of `prefix`. None for another state folder's files, and for files that are no
    segments."""
    head = posixpath.basename(prefix) + "."
    match = _SEGMENT.fullmatch(file_name.removeprefix(head)) if file_name.startswith(head) else None
    if match is None:
        return None
    return SegmentName(
        job=match["job"],
        replica=match["kind"] == "p",
        rank=int(match["rank"]),
        suffix=match["suffix"],
        maker_pid=int(match["maker"] or 0),
    )
