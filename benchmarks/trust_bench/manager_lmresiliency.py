"""The recovery manager that LM Resiliency leaves to whoever runs it ("Manager Interface" in its documentation).

It owns the store in which the agents meet. A generation that a worker or SCOUT reports as failed is followed by one on
the same nodes, and one whose node is lost by one with a standby in its place. A node is lost if its agent has sent no
heartbeat for as long as the agents allow each other. All ranks restore the newest step that each of them has verified
on the disk.

    python manager_lmresiliency.py --port PORT --machine-ids FILE FILE FILE FILE
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from flyball.contracts.clock import SystemClock  # noqa: E402 - the line above makes it importable

if TYPE_CHECKING:
    from torch.distributed import Store

ADDRESS = "127.0.0.1"
RUN = "race"
RANKS = 2
PORT_VARIABLE = "TRUST_RACE_MANAGER_PORT"
HEARTBEAT_TIMEOUT_S = 10.0  # the default of LM Resiliency's agents
RESTART_DEADLINE_S = 120.0
LOOK_S = 0.1
_PREFIX = f"race/{RUN}"


class Restorable(NamedTuple):
    """What a rank has verified on the disk. `topology`: LM Resiliency restores under the same one only."""

    step: int
    topology: str


class Reports:
    """What workers tell the manager, by way of its store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def connect(cls) -> Self:
        from torch.distributed import TCPStore

        return cls(TCPStore(ADDRESS, int(os.environ[PORT_VARIABLE]), is_master=False))

    def failed(self, generation: int, why: str) -> None:
        self._store.set(f"{_PREFIX}/failed/{generation}", why)

    def fault(self, generation: int, report: Mapping[str, Any]) -> None:
        """Only a hang ends a generation: of the rest SCOUT says that the ranks may go on."""
        if report["kind"] == "hang":
            self.failed(generation, f"SCOUT reports a hang of the ranks {report['failed_ranks']}")

    def restorable(self, rank: int, found: Restorable) -> None:
        self._store.set(f"{_PREFIX}/restorable/{rank}", json.dumps(found))

    def why_failed(self, generation: int) -> str | None:
        return self._read(f"{_PREFIX}/failed/{generation}")

    def common(self) -> Restorable | None:
        """The newest that all ranks have; None: some have none."""
        read = [self._read(f"{_PREFIX}/restorable/{rank}") for rank in range(RANKS)]
        found = [Restorable(*json.loads(text)) for text in read if text is not None]
        return min(found) if len(found) == RANKS else None

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


class Heartbeats:
    """Which agents are alive, by the heartbeats that they write into the store."""

    def __init__(self, timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._heard: dict[str, tuple[bytes, float]] = {}  # node -> its newest heartbeat, and since when it is that

    def hear(self, node: str, heartbeat: bytes, now_s: float) -> None:
        if node not in self._heard or self._heard[node][0] != heartbeat:
            self._heard[node] = heartbeat, now_s

    def is_lost(self, node: str, now_s: float) -> bool:
        """No heartbeat for too long, or never one."""
        return node not in self._heard or now_s - self._heard[node][1] >= self._timeout_s


def replacement(
    active: Sequence[str], standbys: Iterable[str], heartbeats: Heartbeats, now_s: float
) -> tuple[int, str] | None:
    """The slot of the first lost node and the standby that takes it; None: none is lost, or no standby is left."""
    lost = next((slot for slot, node in enumerate(active) if heartbeats.is_lost(node, now_s)), None)
    standby = next((node for node in standbys if not heartbeats.is_lost(node, now_s)), None)
    return None if lost is None or standby is None else (lost, standby)


def manage(store: Store, hosts: int) -> None:
    """Publish a generation after the other, until a signal ends the process."""
    from lm_resiliency.integrations.torchrun import TorchrunRecoveryCoordinator, TorchrunRecoveryRequest

    reports, heartbeats = Reports(store), Heartbeats()
    coordinator = TorchrunRecoveryCoordinator(store, run_id=RUN)
    while (initial := coordinator.initial_placement(active_node_count=RANKS, allocated_node_count=hosts)) is None:
        time.sleep(LOOK_S)
    nodes = (*initial.active_node_ids, *initial.standby_node_ids)
    generation, active, quarantined = 0, initial.active_node_ids, ()
    while True:
        time.sleep(LOOK_S)
        coordinator.check_health()
        now_s = time.monotonic()
        for node in nodes:
            if store.check([key := _heartbeat_key(node)]):
                heartbeats.hear(node, store.get(key), now_s)
        standbys = [node for node in nodes if node not in active and node not in quarantined]
        instead = replacement(active, standbys, heartbeats, now_s)
        why = f"the node of slot {instead[0]} is lost" if instead is not None else reports.why_failed(generation)
        restored = reports.common()
        if why is None or restored is None:  # a plan without a step is refused
            continue
        print(f"generation {generation} failed: {why}; restoring step {restored.step}", flush=True)
        placed = coordinator.publish_successor(
            generation=generation,
            active_node_ids=active,
            quarantined_node_ids=quarantined,
            request=TorchrunRecoveryRequest(
                plan_id=f"plan-{generation + 1}",
                intent_id=f"incident-{generation + 1}",
                reason_code="machine_unavailable" if instead is not None else "uncertain",
                recovery_mode="recovery_verified",
                checkpoint_source="gemini",
                checkpoint_step=restored.step,
                checkpoint_manifest_id=f"gemini-recovery_verified-{restored.step}",
                topology_digest=restored.topology,
                restart_deadline_unix_ms=int((SystemClock().wall_s() + RESTART_DEADLINE_S) * 1000),
            ),
            local_world_size=1,
            replacement=instead,
        )
        generation, active, quarantined = placed.generation, placed.active_node_ids, placed.quarantined_node_ids


def _heartbeat_key(node: str) -> str:
    """Where an agent of LM Resiliency 0.2.0 writes it: there is no call that reads it."""
    run, of = (hashlib.sha256(text.encode()).hexdigest() for text in (RUN, node))
    return f"lm_resiliency/simple/v1/runs/{run}/heartbeats/{of}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--machine-ids", type=Path, nargs="+", required=True, help="written for the hosts, by which they are told apart"
    )
    options = parser.parse_args()
    for file in options.machine_ids:  # before the port is open, for which the hosts wait
        file.write_text(hashlib.sha256(file.name.encode()).hexdigest()[:32] + "\n")
    from torch.distributed import TCPStore

    store = TCPStore(
        ADDRESS, options.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=RESTART_DEADLINE_S)
    )
    manage(store, len(options.machine_ids))


if __name__ == "__main__":
    main()
