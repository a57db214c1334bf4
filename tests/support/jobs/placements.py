"""Placements that tests make."""

from __future__ import annotations

from collections.abc import Mapping

from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.cluster import HostRanks, Placement


def make_placement(ranks: Mapping[str, tuple[int, ...]], *, generation: int = 1, **fields: object) -> Placement:
    """`ranks` by host. Host a's engine is at "a:1"."""
    made = {
        "job": "job",
        "generation": generation,
        "world_size": sum(map(len, ranks.values())),
        "hosts": tuple(HostRanks(host, "127.0.0.1", f"{host}:1", held) for host, held in ranks.items()),
        "master_address": "127.0.0.1",
        "master_port": 1,
        "peers": {},
        "lineage": (LineageEntry(generation),),
        "restore": None,
    }
    return Placement(**made | fields)  # type: ignore[arg-type]  # as given
