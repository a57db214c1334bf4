"""Reads every byte of copies, to find out which copies and steps are good."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

import msgspec

from ckpt_engine.format import integrity
from ckpt_engine.format.coverage import step_problems
from ckpt_engine.format.manifest import Manifest, TensorEntry
from ckpt_engine.format.step_listing import StepKey
from ckpt_engine.inspect.copy_places import reason
from ckpt_engine.inspect.inventory import HeldCopy
from ckpt_engine.inspect.shard_reading import CopyGone
from flyball.contracts.checkpoints import ShardCopy
from flyball.contracts.errors import CheckpointError, CorruptShard, FlyballError

THREADS = 2  # each reads and hashes one copy


class CopyVerdict(StrEnum):
    GOOD = "good"
    BAD = "bad"
    UNREAD = "unread"  # it cannot be read at the moment: it may be good
    GONE = "gone"  # overwritten or removed meanwhile by a running job


class Verified(msgspec.Struct, frozen=True):
    """The result for one copy. `bad_chunks` are indexes of chunks of `chunk_bytes`. They are empty if the copy ends
    early or cannot be read: see `problem`."""

    copy: ShardCopy
    path: str
    verdict: CopyVerdict
    problem: str
    chunks: int
    chunk_bytes: int
    bad_chunks: tuple[int, ...]


class ReadShard(msgspec.Struct, frozen=True):
    """The content of a readable copy. `tensors` is () unless the copy is good."""

    manifest: Manifest
    tensors: tuple[TensorEntry, ...] = ()


class VerifiedStep(msgspec.Struct, frozen=True):
    """Whether a step's good copies are complete. `problems` are tensors that they do not cover."""

    step: int
    generation: int
    world_size: int
    missing_ranks: tuple[int, ...]
    problems: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return not self.missing_ranks and not self.problems


def verify_copies(
    held_copies: Sequence[HeldCopy], on_bytes: Callable[[int], None]
) -> Iterator[tuple[Verified, ReadShard | None]]:
    """Verify the copies, two at a time. Yields the results in order, with the content if the manifest could be read.
    `on_bytes` is called for every chunk, from any thread. Closing the iterator ends the reading."""
    over = threading.Event()

    def count(size_bytes: int) -> None:
        if over.is_set():
            raise CheckpointError("Nobody waits for the result any more.")
        on_bytes(size_bytes)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
        try:
            yield from pool.map(lambda held: _verify(held, count), held_copies)
        finally:
            over.set()


def judge_steps(shards: Iterable[ReadShard], world_sizes: Mapping[StepKey, int]) -> tuple[VerifiedStep, ...]:
    """The steps, newest first. `shards`: the good copies that count, any number per rank."""
    by_step: dict[StepKey, dict[int, tuple[TensorEntry, ...]]] = defaultdict(dict)
    for shard in shards:
        manifest = shard.manifest
        by_step[manifest.generation, manifest.step].setdefault(manifest.rank, shard.tensors)
    return tuple(
        VerifiedStep(
            step=step,
            generation=generation,
            world_size=world_size,
            missing_ranks=tuple(rank for rank in range(world_size) if rank not in by_step[generation, step]),
            problems=tuple(
                f"{problem.fqn}: {problem.reason}" for problem in step_problems(by_step[generation, step].values())
            ),
        )
        for (generation, step), world_size in sorted(world_sizes.items(), reverse=True)
    )


def _verify(held: HeldCopy, on_bytes: Callable[[int], None]) -> tuple[Verified, ReadShard | None]:
    path = held.path
    shard: ReadShard | None = None
    verdict, problem = CopyVerdict.GOOD, ""
    bad: list[int] = []
    try:
        with held.place.reading(held.copy) as reading:
            shard = ReadShard(reading.manifest)
            for index, (chunk, error) in enumerate(reading.chunks()):
                on_bytes(len(chunk))
                if error is not None:
                    bad.append(index)
                    verdict, problem = CopyVerdict.BAD, problem or error.message
            if verdict is CopyVerdict.GOOD:
                shard = ReadShard(reading.manifest, reading.tensors())
    except CopyGone as error:
        verdict, problem = CopyVerdict.GONE, error.message
    except CorruptShard as error:
        verdict, problem = CopyVerdict.BAD, reason(error)
    except (FlyballError, OSError) as error:
        verdict, problem = CopyVerdict.UNREAD, reason(error)
    chunk_bytes = shard.manifest.chunk_bytes if shard else 0
    chunks = integrity.chunk_count(shard.manifest.payload_bytes, chunk_bytes) if shard else 0
    return Verified(held.copy, path, verdict, problem, chunks, chunk_bytes, tuple(bad)), shard
