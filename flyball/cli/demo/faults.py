"""The demo's four faults, and the measurement of each recovery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flyball.cli.demo.events import EventFeed
from flyball.cli.demo.stack import JOB, WORLD_SIZE, DemoStack
from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.decisions import DecisionKind, IncidentState
from flyball.contracts.events import Event, EventKind

if TYPE_CHECKING:
    from simulator.inject.faults import Injection

STEPS_BETWEEN_FAULTS = 5
START_DEADLINE_S = 180.0  # importing torch on a slow machine
PROGRESS_DEADLINE_S = 120.0
RECOVERY_DEADLINE_S = 120.0
SPARE_DEADLINE_S = 180.0  # importing torch once more, while ranks train


@dataclass(frozen=True)
class RankRestore:
    """Where one rank's bytes came from."""

    rank: int
    tier: str
    host: str
    size_bytes: int
    socket_bytes: int
    transport: str  # "tcp", "rdma"; '' if no engine sent them


@dataclass(frozen=True)
class FaultRow:
    """One fault and its recovery. Seconds count from the injector's timestamp, taken just before the fault."""

    fault: str
    target: str
    signal: str
    decision: str
    detected_s: float
    decided_s: float
    resumed_s: float
    lost_steps: int
    restored_step: int
    restored_from: str
    incident_id: str
    recovered: bool
    restored: tuple[RankRestore, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inject_and_measure(stack: DemoStack, fault: str) -> FaultRow:
    """Inject one fault into a running job and follow it until its incident is resolved."""
    stack.wait(lambda: all(map(_is_closed, _incidents(stack))), "the end of earlier incidents", RECOVERY_DEADLINE_S)
    before = {i["incident_id"] for i in _incidents(stack)}
    injected = inject(stack, fault)
    label = injected.target

    def incident() -> dict[str, Any] | None:
        found = [i for i in _incidents(stack) if i["incident_id"] not in before]
        return min(found, key=lambda i: float(i["opened_at"])) if found else None

    def closed() -> bool:
        found = incident()
        return found is not None and _is_closed(found)

    stack.wait(lambda: incident() is not None, f"the detection of the fault {fault} ({label})", RECOVERY_DEADLINE_S)
    stack.wait(closed, f"the recovery from the fault {fault} ({label})", RECOVERY_DEADLINE_S)
    stack.poll()  # fetch the events written before the incident's end
    found = incident() or {}
    generation = _last_generation(stack.feed, str(found["incident_id"]))
    stack.wait(
        lambda: _is_reported(stack.feed, found, generation),
        f"a step of every rank after the fault {fault}",
        PROGRESS_DEADLINE_S,
    )
    return _row(stack.feed, fault=fault, label=label, stamp=injected.at, incident=found, generation=generation)


def _incidents(stack: DemoStack) -> list[dict[str, Any]]:
    return stack.client.items("/v1/incidents", job=JOB)


def _is_closed(incident: Mapping[str, Any]) -> bool:
    return IncidentState(incident["state"]).closed


def _last_generation(feed: EventFeed, incident_id: str) -> int:
    """The generation that resolved the incident, -1 if none was started for it."""
    started = feed.select(EventKind.GENERATION_STARTED, incident_id=incident_id)
    return max((event.generation for event in started), default=-1)


def _is_reported(feed: EventFeed, incident: Mapping[str, Any], generation: int) -> bool:
    """Whether the log has everything to be measured. Engines may report their restores later than the steps."""
    restored = {event.rank for event in feed.select(EventKind.RESTORED, generation=generation)}
    has_restored = generation < 0 or int(incident["restored_step"]) < 0 or len(restored) == WORLD_SIZE
    return has_restored and feed.resumed_at(generation, int(incident["failed_step"]), WORLD_SIZE) is not None


def _row(
    feed: EventFeed, *, fault: str, label: str, stamp: float, incident: Mapping[str, Any], generation: int
) -> FaultRow:
    incident_id = str(incident["incident_id"])
    decisions = [
        e
        for e in feed.select(EventKind.DECISION, incident_id=incident_id)
        if e.data.get("kind") != DecisionKind.HOLD.value
    ]
    resumed_at = feed.resumed_at(generation, int(incident["failed_step"]), WORLD_SIZE)
    restored = tuple(
        sorted((_restored(e) for e in feed.select(EventKind.RESTORED, generation=generation)), key=lambda r: r.rank)
    )
    detected_at = float(incident.get("observed_at") or incident["opened_at"])
    return FaultRow(
        fault=fault,
        target=label,
        signal=str(incident["signal"]),
        decision=" + ".join(dict.fromkeys(str(e.data.get("kind")) for e in decisions)),
        detected_s=round(detected_at - stamp, 3),
        decided_s=round(decisions[0].at - stamp, 3) if decisions else -1.0,
        resumed_s=round(resumed_at - stamp, 3) if resumed_at else -1.0,
        lost_steps=int(incident["lost_steps"]),
        restored_step=int(incident["restored_step"]),
        restored_from=_sources(restored),
        incident_id=incident_id,
        recovered=incident["state"] == IncidentState.RESOLVED.value and bool(decisions) and resumed_at is not None,
        restored=restored,
    )


def _restored(event: Event) -> RankRestore:
    data = event.data
    return RankRestore(
        rank=event.rank,
        tier=str(data.get("source_tier", "")),
        host=str(data.get("source_host", "") or event.host_id),
        size_bytes=int(str(data.get("size_bytes", 0))),
        socket_bytes=int(str(data.get("socket_bytes", 0))),
        transport=str(data.get("transport", "")),
    )


def _sources(restored: tuple[RankRestore, ...]) -> str:
    """The tiers other than memory that ranks restored from, for example 'peer host-a'; 'memory' if there are none."""
    elsewhere = dict.fromkeys(f"{r.tier} {r.host}" for r in restored if r.tier != Tier.MEMORY)
    return ", ".join(elsewhere) or (Tier.MEMORY.value if restored else "")


# --- targets ---------------------------------------------------------------------------------------------------------

KILLED_RANK = 1
HUNG_RANK = 2
LOST_RANK = 3  # its host is lost, and all ranks on it change hosts
PREEMPTED_RANK = 0  # its host gets the preemption notice
NOTICE_S = 60.0


def inject(stack: DemoStack, fault: str) -> Injection:
    """Inject one fault into the running job. The result's timestamp is taken just before the fault."""
    from simulator.inject import faults

    clock = SystemClock()
    if fault == "kill":
        return faults.kill(stack.client, job=JOB, rank=KILLED_RANK, clock=clock)
    if fault == "hang":
        return faults.hang(stack.client, job=JOB, rank=HUNG_RANK, clock=clock)
    if fault == "host-down":
        host_id = _host_of(stack, LOST_RANK)
        stack.expect_loss(host_id)
        return faults.host_down(stack.client, host_id=host_id, clock=clock)
    return faults.preempt(stack.client, host_id=_host_of(stack, PREEMPTED_RANK), deadline_s=NOTICE_S, clock=clock)


def _host_of(stack: DemoStack, rank: int) -> str:
    return next(str(r["host_id"]) for r in stack.job()["ranks"] if r["rank"] == rank)
