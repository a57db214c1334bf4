"""Files that another process writes to line by line, read while it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[str]:
    """Without the one that is being written: across the end of a page it can be seen by halves."""
    return path.read_text().rpartition("\n")[0].splitlines()


def read_log(path: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a JSON log that tell of an event."""
    lines = [json.loads(line) for line in whole_lines(path) if f'"{event}"' in line and line.startswith("{")]
    return [line for line in lines if line.get("event") == event]
