"""The saves of a run, one JSON object per line; written in the training process, so it imports little."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flyball.contracts.wire import decode


class Save(msgspec.Struct, frozen=True):
    """One asynchronous save: called for after `step` at `began_at`, the checkpoint complete at `finished_at` (wall
    clock)."""

    step: int
    began_at: float
    finished_at: float


def write_save(path: Path, save: Save) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(save) + b"\n")


def read_saves(path: Path) -> list[Save]:
    return [decode(line, Save) for line in path.read_bytes().splitlines()] if path.exists() else []
