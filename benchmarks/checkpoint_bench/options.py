"""What every part of the benchmark is told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

STEP_TO_COPY = 3.0  # a step takes at least this many times the copy


@dataclass(frozen=True)
class Options:
    """One run of one part."""

    state_bytes: int
    repeats: int
    folder: Path  # on the disk that is measured; what is made in it is removed

    def arguments(self) -> list[str]:
        return ["--state-bytes", str(self.state_bytes), "--repeats", str(self.repeats), "--folder", str(self.folder)]


def parse_part(names: list[str]) -> tuple[str, Options]:
    """The arguments of a part's own process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=names)
    parser.add_argument("--state-bytes", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    return given.part, Options(given.state_bytes, given.repeats, given.folder)
