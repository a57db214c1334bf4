"""Measures the restore of a data-parallel job that only an object store has, with and without broadcast load.

    python benchmarks/broadcast.py                     a table for 64 MiB per rank
    python benchmarks/broadcast.py --json --size 0.25  one JSON object on stdout, progress on stderr
    python benchmarks/broadcast.py --saved-by 4 --hosts 3   restored in another layout: 4 hosts saved the step

Real engines on this machine, one host and one rank each, with the same bytes except for one small tensor. The store is
a server on this machine (`broadcast_bench/limited_store.py`) that gives all hosts together the bandwidth of each row,
and counts its bytes. The network is the loopback interface, without limit: faster than most between hosts, but all
engines and the store share this machine's cores. Each run begins with new engines, which have nothing in memory, and
takes from the first Configure to the last rank's verified slot. Runs with `off`, `on` and `auto` are interleaved.
With `--saved-by` each rank asks for the whole shard of the rank of its number, as data-parallel ranks do, and the time
ends when the engines have brought the last of them.

Exit codes: 0; 2 for wrong arguments; 7 for too little memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import httpx  # noqa: E402 - the lines above make what follows importable
import numpy as np  # noqa: E402
from checkpoint_bench import report  # noqa: E402
from checkpoint_bench.engine_host import JOB, EngineHost, folder_prefix, remove_leftovers  # noqa: E402
from checkpoint_bench.measure import available_bytes, interleaved, progress, spread, wait_until  # noqa: E402
from safetensors.numpy import save  # noqa: E402

from ckpt_engine.contracts.control_views import RestoreState  # noqa: E402
from ckpt_engine.contracts.wanted_chunks import encode_wanted, wanted_name  # noqa: E402
from ckpt_engine.format import integrity, manifest  # noqa: E402
from ckpt_engine.format.shard_names import shard_name  # noqa: E402
from ckpt_engine.settings import EngineSettings  # noqa: E402
from ckpt_engine.slots.rank_segments import RankSegments  # noqa: E402
from ckpt_engine.tiers.opening import open_persistent  # noqa: E402
from ckpt_engine.trainer.restore.load_shard import read_manifest  # noqa: E402
from flyball.contracts.checkpoints import (  # noqa: E402
    CheckpointSpec,
    LineageEntry,
    RestorePlan,
    ShardSource,
    Tier,
)
from flyball.contracts.cluster import HostRanks, Placement  # noqa: E402
from flyball.contracts.identity import Fence  # noqa: E402
from flyball.contracts.on_host.engine_wire import Configure, GetStatus  # noqa: E402
from flyball.contracts.on_host.segments import rank_segment  # noqa: E402

GIB, MB = 1 << 30, 1_000_000
STEP = 7
PLACE = "s3://bucket/jobs"
MODES = ("off", "on", "auto")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", type=float, default=0.0625, help="GiB of state of each rank (0.0625)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every measurement (3)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="numbers of hosts (2 4)")
    parser.add_argument(
        "--store", type=int, nargs="+", default=[50, 200, 0], help="MB/s of the store; 0: no limit (50 200 0)"
    )
    parser.add_argument("--saved-by", type=int, default=0, help="hosts that saved the step (0: as many as restore it)")
    options = parser.parse_args()
    if options.repeats < 1 or options.size < 0.005 or min(options.hosts) < 2 or min(options.store) < 0:
        parser.error("--repeats must be at least 1, --size at least 0.005, --hosts at least 2")
    if options.saved_by < 0 or options.saved_by in options.hosts:
        parser.error("--saved-by must be another number than those of --hosts")
    return options


@contextmanager
def limited_store(bytes_per_s: int) -> Iterator[str]:
    """Its URL. This process and the engines that it starts find it by their environment."""
    # It ends with this process, even if that is killed.
    command = [sys.executable, "-P", "-m", "flyball.cli.run.tied", str(os.getpid()), "broadcast_bench.limited_store"]
    server = subprocess.Popen([*command, "--bytes-per-s", str(bytes_per_s)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "may"}
        os.environ["AWS_REGION"] = "us-east-1"
        yield url
    finally:
        server.kill()
        server.wait()


def given_bytes(url: str) -> int:
    found: dict[str, int] = httpx.get(f"{url}/-/given", timeout=60).json()
    return sum(size_bytes for name, size_bytes in found.items() if name.endswith(".safetensors"))


def store_step(ranks: int, state_bytes: int) -> None:
    """Put a step of replicas into the store."""
    store = open_persistent(PLACE, job=JOB, settings=EngineSettings())
    weights = np.random.default_rng(STEP).integers(0, 256, state_bytes, np.uint8)
    for rank in range(ranks):
        payload = memoryview(save({"weights": weights, "rank": np.full(1024, rank)}))
        described = manifest.describe(
            payload, job=JOB, generation=1, step=STEP, rank=rank, world_size=ranks, code_version="benchmark"
        )
        store.write(described, manifest.encode(described), payload)
    store.seal(1, STEP, ranks)


def restore(mode: str, ranks: int, saved_by: int, url: str, given: list[int]) -> float:
    """Restore the step on new hosts. Returns the seconds, and adds what the store gave to `given`."""
    os.environ["FLYBALL_CKPT_BROADCAST"] = mode
    spec = CheckpointSpec(persistent_dir=PLACE, persistent_every_steps=1, replicas=0)
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as root:
        hosts = [EngineHost(Path(root), f"host{number}") for number in range(ranks)]
        try:
            for host in hosts:
                host.start()
            before, began_s = given_bytes(url), time.perf_counter()
            placement = Placement(
                job=JOB,
                generation=2,
                world_size=ranks,
                hosts=tuple(
                    HostRanks(host.host_id, "127.0.0.1", host.ask(GetStatus()).address, (rank,))
                    for rank, host in enumerate(hosts)
                ),
                master_address="127.0.0.1",
                master_port=1,
                peers={},
                lineage=(LineageEntry(1, STEP, world_size=saved_by), LineageEntry(2, world_size=ranks)),
                restore=RestorePlan(
                    STEP, {str(rank): (ShardSource(rank, 1, Tier.PERSISTENT, "", ""),) for rank in range(saved_by)}
                ),
            )
            for host in hosts:
                if not (reply := host.ask(Configure(Fence(1, 2), host.host_id, placement, spec))).ok:
                    raise RuntimeError(f"{host.host_id} refused its configuration: {reply.message}")
            slots = [
                RankSegments.open(rank_segment(host.prefix, JOB, rank), create=True) for rank, host in enumerate(hosts)
            ]
            try:
                if saved_by != ranks:
                    wait_until(lambda: all(segments.control.read_restore().path for segments in slots), "headers", 60.0)
                    for rank, segments in enumerate(slots):
                        ask(segments, rank, rank % saved_by)
                wait_until(lambda: all(map(is_settled, slots)), "the restore", 600.0)
                seconds = time.perf_counter() - began_s
                for rank, segments in enumerate(slots):
                    if saved_by != ranks:
                        check_brought(segments, rank % saved_by)
                    else:
                        check(segments)
            finally:
                for segments in slots:
                    segments.close()
            given.append(given_bytes(url) - before)
            return seconds
        finally:
            for host in hosts:
                host.end()


def shard_brought(segments: RankSegments, saved: int) -> Path:
    return Path(segments.control.read_restore().path) / shard_name(saved)


def ask(segments: RankSegments, rank: int, saved: int) -> None:
    """As the trainer of a rank that needs the whole shard that `saved` saved."""
    shard = shard_brought(segments, saved)
    described = read_manifest(shard)
    chunks = range(integrity.chunk_count(described.payload_bytes, described.chunk_bytes))
    new = shard.with_name(f"{rank}.new")
    new.write_bytes(encode_wanted({saved: chunks}))
    new.rename(shard.with_name(wanted_name(rank, 0)))


def check_brought(segments: RankSegments, saved: int) -> None:
    """Every byte of the shard is there."""
    if error := segments.control.read_restore().error:
        raise RuntimeError(f"not restored: {error}")
    shard = shard_brought(segments, saved)
    described = read_manifest(shard)
    integrity.verify(memoryview(shard.read_bytes()), described.chunk_digests, described.chunk_bytes)


def is_settled(segments: RankSegments) -> bool:
    words = segments.control.read_restore()
    return words.generation == 2 and words.state in (RestoreState.READY, RestoreState.FAILED)


def check(segments: RankSegments) -> None:
    """The slot has the step, and every byte of it."""
    view = segments.find(1, STEP)
    described = segments.committed(view.index) if view is not None else None
    if view is None or described is None:
        raise RuntimeError(f"not restored: {segments.control.read_restore().error}")
    integrity.verify(segments.payload(view.index), described.chunk_digests, described.chunk_bytes)


def measure(ranks: int, saved_by: int, store_mb_s: int, state_bytes: int, repeats: int) -> dict[str, Any]:
    with limited_store(store_mb_s * MB) as url:
        store_step(saved_by, state_bytes)
        given: dict[str, list[int]] = {mode: [] for mode in MODES}
        actions = {mode: partial(restore, mode, ranks, saved_by, url, given[mode]) for mode in MODES}
        runs = interleaved(actions, repeats, what=f"{ranks} hosts, {store_mb_s or 'unlimited'} MB/s")
        return {
            mode: {"seconds": spread(runs[mode], 3), "store_mb": spread([count / MB for count in given[mode]], 1)}
            for mode in MODES
        }


def main() -> int:
    options = parse()
    remove_leftovers(Path(tempfile.gettempdir()))
    state_bytes = int(options.size * GIB)
    needed, available = state_bytes * max(*options.hosts, options.saved_by) * 4 + GIB, available_bytes()
    if available < needed:
        print(
            f"broadcast: {available / GIB:.1f} GiB of memory are free, and {options.size:g} GiB of state need "
            f"{needed / GIB:.1f} GiB.\nFree memory, or give a smaller --size.",
            file=sys.stderr,
        )
        return 7
    before, results = report.machine(), {}
    for ranks in options.hosts:
        for store_mb_s in options.store:
            progress(f"{ranks} hosts restore {options.size:g} GiB each, the store gives {store_mb_s or 'any'} MB/s")
            saved_by = options.saved_by or ranks
            name = f"{saved_by}_to_{ranks}" if options.saved_by else str(ranks)
            found = measure(ranks, saved_by, store_mb_s, state_bytes, options.repeats)
            results[f"{name}_hosts_{store_mb_s}_mb_s"] = found
    if options.json:
        print(json.dumps({"size_gib": options.size, "repeats": options.repeats, "machine": before, **results}))
        return 0
    print(f"{'':22}" + "".join(f"{mode:>24}" for mode in MODES) + f"  (medians of {options.repeats})")
    for name, found in results.items():
        cells = (
            f"{found[mode]['seconds']['median']:9.2f} s {found[mode]['store_mb']['median']:9.0f} MB" for mode in MODES
        )
        print(f"{name:22}" + "".join(f"{cell:>24}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
