"""File names of one job's shards, in every tier that has names. Pure.

g<generation>/step<step>/rank<rank>.safetensors     a shard
                         rank<rank>.manifest        its manifest; written after it
                         world.manifest             persistent tier: the step is complete; written last
                         pinned                     retention keeps the step
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt_engine.format.world_manifest import WORLD_MANIFEST

SHARD_SUFFIX = ".safetensors"
MANIFEST_SUFFIX = ".manifest"
PINNED = "pinned"
# One spelling per number, and no endless digits, so that foreign names do not pass for ours.
_NUMBER = "(0|[1-9][0-9]{0,17})"
_RANK_MANIFEST = re.compile(f"g{_NUMBER}/step{_NUMBER}/rank{_NUMBER}" + re.escape(MANIFEST_SUFFIX))
_RANK_FILE = re.compile(
    f"g{_NUMBER}/step{_NUMBER}/rank{_NUMBER}({re.escape(SHARD_SUFFIX)}|{re.escape(MANIFEST_SUFFIX)})"
)
_OWN_MANIFEST = re.compile(f"rank{_NUMBER}" + re.escape(MANIFEST_SUFFIX))
_GENERATION_FOLDER = re.compile(f"g{_NUMBER}")
_STEP_FOLDER = re.compile(f"g{_NUMBER}/step{_NUMBER}")
_STEP_FILE = re.compile(f"g{_NUMBER}/step{_NUMBER}/({re.escape(WORLD_MANIFEST)}|{PINNED})")


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """Identifies a shard of the job."""

    generation: int
    step: int
    rank: int

    @property
    def shard(self) -> str:
        return f"{step_folder(self.generation, self.step)}/{shard_name(self.rank)}"

    @property
    def manifest(self) -> str:
        return f"{step_folder(self.generation, self.step)}/{manifest_name(self.rank)}"


def shard_name(rank: int) -> str:
    """A shard's file name in its step's folder."""
    return f"rank{rank}{SHARD_SUFFIX}"


def manifest_name(rank: int) -> str:
    """The name of its manifest there."""
    return f"rank{rank}{MANIFEST_SUFFIX}"


def step_folder(generation: int, step: int) -> str:
    return f"g{generation}/step{step}"


def is_generation_folder(name: str) -> bool:
    return _GENERATION_FOLDER.fullmatch(name) is not None


def parse_step_folder(name: str) -> tuple[int, int] | None:
    """(generation, step), or None for any other name."""
    match = _STEP_FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def world_manifest_name(generation: int, step: int) -> str:
    return f"{step_folder(generation, step)}/{WORLD_MANIFEST}"


def pinned_name(generation: int, step: int) -> str:
    return f"{step_folder(generation, step)}/{PINNED}"


def parse_rank_manifest(name: str) -> ShardKey | None:
    """The shard of a manifest's file name, or None for any other name."""
    match = _RANK_MANIFEST.fullmatch(name)
    return ShardKey(*(int(number) for number in match.groups())) if match else None


def rank_of_manifest(name: str) -> int | None:
    """The rank of a manifest's file name in its step's folder, or None for any other name."""
    match = _OWN_MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def parse_rank_file(name: str) -> ShardKey | None:
    """The shard of its own or its manifest's file name, or None for any other name."""
    match = _RANK_FILE.fullmatch(name)
    return ShardKey(int(match[1]), int(match[2]), int(match[3])) if match else None


def parse_step_file(name: str) -> tuple[int, int, str] | None:
    """(generation, step, WORLD_MANIFEST or PINNED), or None for any other name."""
    match = _STEP_FILE.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None
