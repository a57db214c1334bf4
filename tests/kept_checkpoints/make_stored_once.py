"""Make the step of this release that two ranks stored once, and that later releases must read:

    PYTHONPATH=.:tests python tests/kept_checkpoints/make_stored_once.py tests/kept_checkpoints/stored_layout_2

Once for a format, never again: what is kept is not made anew. It is small, so what is worth sharing is set lower here
than in an engine; the layout is the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
from pathlib import Path

from support.jobs.saved_steps import truth
from support.stores.kept_json import in_json

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.counters import Counters
from ckpt_engine.format import manifest as manifests
from ckpt_engine.rules import storage_plan
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing.storing_together import StoringTogether
from ckpt_engine.trainer.capture.capturer import Capturer
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Tier
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

STEP, RANKS = 4, (0, 1)


def main() -> None:
    folder = Path(sys.argv[1])
    storage_plan.WORTH_IT_BYTES = 1  # type: ignore[misc]
    storage_plan.WORTH_IT_SHARE = 0.0  # type: ignore[misc]
    storage_plan.MIN_SHARED_BYTES = 1  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as shm:
        memory = MemoryTier(f"{shm}/flyball-make", "job", "host")
        hosts = (HostRanks("host", "127.0.0.1", "", RANKS),)
        placement = Placement("job", 1, len(RANKS), hosts, "127.0.0.1", 1, {}, (LineageEntry(1),), None)
        configure = Configure(Fence(1, 1), "host", placement, CheckpointSpec())
        disk = ShardStore(FolderStorage(folder), tier=Tier.DISK, job="job", host_id="host")
        together = StoringTogether(
            HostGeneration(configure, "host"),
            memory=memory,
            disk=disk,
            counters=Counters(),
            on_compared=lambda step, found: None,
        )
        for rank in RANKS:
            prepared = Capturer().take(truth() | {"rank": rank})
            payload = memoryview(bytearray(prepared.payload_bytes))
            prepared.copy_into(0, payload)
            described = manifests.describe(
                payload,
                job="job",
                generation=1,
                step=STEP,
                rank=rank,
                world_size=len(RANKS),
                code_version="0.1.0",
                chunk_bytes=64,
            )
            with memory.using(rank, create=True) as entry:
                assert entry is not None
                entry.segments.begin_write(0, 1, STEP, len(payload))[:] = payload
                entry.segments.mark_captured(0)
                assert entry.segments.commit(entry.segments.control.slot(0), manifests.encode(described))

        def write(rank: int) -> None:
            with memory.using(rank) as entry:
                found = memory.find(entry, 1, STEP) if entry is not None else None
                assert entry is not None and found is not None
                view, manifest, data = found
                assert together.write(STEP, entry.segments.payload(view.index), manifest, data) is not None
            together.withdraw(STEP, rank)

        threads = [threading.Thread(target=write, args=(rank,)) for rank in RANKS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        memory.close()
    made = sorted((folder / "g1" / f"step{STEP}").iterdir())
    if not (folder / "truth.json").exists():
        (folder / "truth.json").write_text(json.dumps(in_json(truth())) + "\n")
        made.append(folder / "truth.json")
    with (folder / "SHA256SUMS").open("a") as sums:
        for path in made:
            sums.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n")


if __name__ == "__main__":
    main()
