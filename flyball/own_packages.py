"""Flyball's packages before all others of the same names."""

from __future__ import annotations

import sys
from pathlib import Path


def prefer_own_packages() -> None:
    """Put the folder that Flyball lives in first on this process's path: a user's PYTHONPATH may have packages named
    `services` or `goodput` of its own. Training processes keep the user's order."""
    root = str(Path(__file__).parents[1])
    sys.path[:] = [root, *(entry for entry in sys.path if entry != root)]
