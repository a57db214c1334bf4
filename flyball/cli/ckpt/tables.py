"""The output of `flyball ckpt`: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest, TensorEntry
from ckpt_engine.format.step_listing import StepListing
from ckpt_engine.inspect.copy_places import Ignored
from ckpt_engine.inspect.extract_step import ExtractedShard
from ckpt_engine.inspect.inventory import CopyInventory, HeldCopy, read_tensors
from ckpt_engine.rules.memory_plan import readable_size
from flyball.cli.show.output import announce, print_fields, print_table
from flyball.contracts.checkpoints import PeerTransports, Tier

DIGEST_SHOWN = 12
RANKS_SHOWN = 8
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def ranks_text(ranks: Sequence[int]) -> str:
    """'0, 3, 4', or '0, 1, 2, ... (64)' for many."""
    shown = ", ".join(map(str, ranks[:RANKS_SHOWN]))
    return shown if len(ranks) <= RANKS_SHOWN else f"{shown}, ... ({len(ranks)})"


# --- ls ---


def listing_json(
    inventory: CopyInventory,
    steps: Sequence[StepListing],
    *,
    runs: Sequence[str],
    transports: Mapping[str, PeerTransports],
    now: float,
) -> dict[str, Any]:
    """The listing as JSON. `now`: wall clock in seconds since the epoch."""
    point = inventory.recovery_point
    return {
        "job": inventory.job,
        "run": inventory.run,
        "runs": runs,
        "recovery_point": point.step if point else None,
        "recovery_generation": point.generation if point else None,
        "lineage": inventory.lineage,
        "places": [{"tier": p.tier, "host_id": p.host_id, "where": p.where} for p in inventory.places],
        "steps": [{**msgspec.to_builtins(step), "age_s": age_s(step, now)} for step in steps],
        "transports": [
            {"host_id": host_id, **msgspec.to_builtins(one)} for host_id, found in transports.items() for one in found
        ],
        "ignored": ignored_json(inventory.ignored),
    }


def age_s(step: StepListing, now: float) -> float | None:
    """Seconds since the step was committed, at least 0. None if no manifest has the time.

    Compares the clocks of two machines: this one, and the host that hashed the step.
    """
    return None if step.committed_at is None else max(0.0, now - step.committed_at)


def age_text(seconds: float | None) -> str | None:
    """'8 s', '12 min', '3 h' or '5 d', rounded down."""
    if seconds is None:
        return None
    unit_s, name = next((unit for unit in _UNITS if seconds >= unit[0]), _UNITS[-1])
    return f"{int(seconds // unit_s)} {name}"


def print_listing(inventory: CopyInventory, steps: Sequence[StepListing], *, hidden: int, now: float) -> None:
    tiers = [tier for tier in Tier if any(share.tier is tier for step in steps for share in step.tiers)]
    print_table(
        f"Checkpoints of {inventory.job}" + (f", run {inventory.run}" if inventory.run else "") + ", ranks per tier",
        ("step", "gen", *(str(tier) for tier in tiers), "size", "age", "state"),
        (
            [
                *(step.step, step.generation),
                *(_share(step, tier) for tier in tiers),
                *(readable_size(step.size_bytes), age_text(age_s(step, now)), _state(step)),
            ]
            for step in steps
        ),
    )
    if hidden:
        announce(f"{hidden} steps that a restart gave up are hidden (--all lists them)")
    announce_ignored(inventory.ignored)


def print_transports(transports: Mapping[str, PeerTransports]) -> None:
    """What carries shards between hosts; nothing if no host here has sent any."""
    rows = [[host_id, one.peer, one.transport, one.reason] for host_id, found in transports.items() for one in found]
    if rows:
        print_table("Shards between hosts", ("host", "peer", "transport", "reason"), rows)


def _share(step: StepListing, tier: Tier) -> str | None:
    share = next((share for share in step.tiers if share.tier is tier), None)
    if share is None:
        return None
    bad = f" {len(share.bad_ranks)} bad" if share.bad_ranks else ""
    return f"{len(share.ranks)}/{step.world_size}" + ("" if share.counts else " unsealed") + bad


def _state(step: StepListing) -> str:
    if not step.alive:
        state = "given up"
    elif step.recovery_point:
        state = "recovery point"
    elif bad := sorted({rank for share in step.tiers for rank in share.bad_ranks}.intersection(step.missing_ranks)):
        state = f"does not verify: {_ranks_phrase(bad)}"
    else:
        state = "complete" if step.complete else f"lacks {_ranks_phrase(step.missing_ranks)}"
    return f"{state}, pinned" if step.pinned else state


def _ranks_phrase(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


# --- show ---


def shard_json(
    held: HeldCopy, manifest: Manifest | None, *, counts: bool, tensors: Sequence[TensorEntry] | None
) -> dict[str, Any]:
    """A copy as JSON. With `tensors` None, only their number is included."""
    found: dict[str, Any] = {
        **msgspec.to_builtins(held.copy),
        "path": held.path,
        "counts": counts,
        "manifest": None,
    }
    if manifest is not None:
        found["manifest"] = {
            "version": manifest.version,
            "code_version": manifest.code_version,
            "world_size": manifest.world_size,
            "payload_bytes": manifest.payload_bytes,
            "chunk_bytes": manifest.chunk_bytes,
            "chunks": integrity.chunk_count(manifest.payload_bytes, manifest.chunk_bytes),
            "tensors": manifest.tensor_count if tensors is None else tensors,
        }
    return found


def print_step(inventory: CopyInventory, step: StepListing, shards: Sequence[tuple[HeldCopy, Manifest | None]]) -> None:
    versions = sorted({manifest.code_version for _, manifest in shards if manifest})
    print_fields(
        {
            "job": inventory.job,
            "run": inventory.run or None,
            "step": step.step,
            "generation": step.generation,
            "world size": step.world_size,
            "state": _state(step),
            "size": f"{readable_size(step.size_bytes)} (one copy per rank)",
            "written by": [f"flyball {version}" for version in versions],
            **_places([held for held, _ in shards]),
        }
    )
    print_table(
        "Copies",
        ("rank", "tier", "host", "size", "chunks", "tensors", "manifest"),
        (_shard_row(held, manifest) for held, manifest in shards),
    )


def _places(held_copies: Sequence[HeldCopy]) -> dict[str, str]:
    """The folders of the files, by tier and host."""
    places = dict.fromkeys(held.place for held in held_copies)
    return {f"in {place.tier}" + (f" of {place.host_id}" if place.host_id else ""): place.where for place in places}


def _shard_row(held: HeldCopy, manifest: Manifest | None) -> list[object]:
    copy = held.copy
    row: list[object] = [copy.rank, copy.tier, copy.host_id, readable_size(copy.size_bytes)]
    if manifest is None:
        return [*row, None, None, "replaced meanwhile"]
    chunks = integrity.chunk_count(manifest.payload_bytes, manifest.chunk_bytes)
    return [*row, chunks, manifest.tensor_count, copy.digest[:DIGEST_SHOWN]]


def print_tensors(held_copies: Iterable[HeldCopy]) -> None:
    """Print one table per rank, because all copies of a rank have the same tensors."""
    seen: set[tuple[int, str]] = set()
    for held in held_copies:
        if (held.copy.rank, held.copy.digest) in seen or (tensors := read_tensors(held)) is None:
            continue
        seen.add((held.copy.rank, held.copy.digest))
        print_table(
            f"Tensors of rank {held.copy.rank}",
            ("name", "dtype", "shape", "of", "from"),
            (
                [
                    tensor.fqn,
                    tensor.dtype,
                    _shape(tensor.shape),
                    *_block(tensor.shape, tensor.global_shape, tensor.offsets),
                ]
                for tensor in tensors
            ),
        )


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _block(shape: Sequence[int], whole: Sequence[int], offsets: Sequence[int]) -> tuple[str | None, str | None]:
    """The shape of the whole tensor and this block's offsets in it; (None, None) if the block is the whole."""
    if tuple(shape) == tuple(whole):
        return None, None
    return _shape(whole), ",".join(map(str, offsets))


# --- restore ---


def print_extracted(shards: Sequence[ExtractedShard], folder: str) -> None:
    print_table(
        f"Written to {folder}",
        ("rank", "from", "host", "size", "file"),
        ([s.rank, s.source.tier, s.source.host_id, readable_size(s.size_bytes), _name(s.path)] for s in shards),
    )
    for shard in shards:
        for passed in shard.passed_over:
            announce(f"rank {shard.rank}: skipped {passed.path}: {passed.reason}")


def _name(path: str) -> str:
    return path.rpartition("/")[2]


# --- all ---


def ignored_json(ignored: Sequence[Ignored]) -> list[dict[str, str]]:
    return [{"where": found.where, "reason": found.reason} for found in ignored]


def announce_ignored(ignored: Sequence[Ignored]) -> None:
    for found in ignored:
        announce(f"ignored {found.where}: {found.reason}")
