"""How hosts are shown in tables."""

from __future__ import annotations

from typing import Any

from flyball.cli.show.output import print_table
from flyball.cli.show.times import ago, clock, rough

HEALTHY = ("healthy", "spare")


def print_hosts(hosts: list[dict[str, Any]], now: float, *, ended_at: float | None) -> None:
    when = f", as of the supervisor's end at {clock(ended_at, now)} UTC" if ended_at else ""
    columns = ("host", "state", "for", "job", "last report", "address", "domain", "reason")
    rows = [[*host_row(h, now), h.get("address"), h.get("failure_domain"), h.get("reason")] for h in hosts]
    print_table(f"Hosts{when}", columns, rows)


def print_conditions(hosts: list[dict[str, Any]], now: float) -> None:
    """What stands against hosts, also what is for the record only."""
    rows = [
        [
            host.get("host_id"),
            f"{one['severity']}, overruled" if one.get("is_overruled") else one["severity"],
            *(rough(now - one["since"]), one["kind"], one.get("subject"), one["source"], one["message"]),
        ]
        for host in hosts
        for one in host.get("conditions") or ()
    ]
    if rows:
        print_table("Conditions", ("host", "severity", "for", "kind", "of", "source", "what is wrong"), rows)


def print_transports(hosts: list[dict[str, Any]]) -> None:
    """What carries shards between hosts, and what each host has registered for that. Older engines do not report it."""
    rows = [
        [host.get("host_id"), found.get("peer"), found.get("transport"), _registered(host), found.get("reason")]
        for host in hosts
        for found in host.get("transports") or ()
    ]
    print_table("Shards between hosts", ("host", "peer", "transport", "registered", "reason"), rows)


def _registered(host: dict[str, Any]) -> str:
    """The memory that the host's NICs may use now."""
    from ckpt_engine.rules.memory_plan import readable_size

    size_bytes = (host.get("counters") or {}).get("rdma_registered_bytes", 0)
    return readable_size(int(size_bytes)) if size_bytes else ""


def host_row(host: dict[str, Any], now: float) -> list[object]:
    drain = _drain(host)
    left_at = host.get("left_at")
    state = f"{host.get('state')}, drain {drain}" if drain else "left" if left_at else host.get("state")
    since = left_at or host.get("since")
    return [
        host.get("host_id"),
        state,
        rough(now - since if since else None),
        host.get("job"),
        ago(host.get("last_report_at"), now),
    ]


def _drain(host: dict[str, Any]) -> str:
    state = str((host.get("drain") or {}).get("state") or "")
    return "" if state == "drained" else state
