"""Measures one part of Flyball's figures in its own process: python -m checkpoint_bench.figures PART ...

Prints JSON to stdout, progress to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from checkpoint_bench.measure import Options, parse_part
from checkpoint_bench.save_figures import measure_blocking, measure_extra, measure_interference, measure_lost
from checkpoint_bench.tier_figures import measure_durable, measure_peer, measure_restore_disk, measure_restore_memory

PARTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "blocking": measure_blocking,
    "lost": measure_lost,
    "interference": measure_interference,
    "durable": measure_durable,
    "peer": measure_peer,
    "restore_memory": measure_restore_memory,
    "restore_disk": measure_restore_disk,
    "extra": measure_extra,
}


def main() -> None:
    part, options = parse_part(list(PARTS))
    json.dump(PARTS[part](options), sys.stdout)


if __name__ == "__main__":
    main()
