"""`flyball describe KIND NAME`: all that is known about one thing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flyball.cli.look.get import KindArgument, fetch
from flyball.cli.look.hosts_table import print_conditions, print_transports
from flyball.cli.look.jobs_table import hosts_note, job_row, known, loss_with_step, outcome, save_note
from flyball.cli.look.kinds import KINDS, ListedKind, find_kind
from flyball.cli.look.stories import print_action, print_decision, print_incident, print_signal
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import (
    Format,
    OutputOption,
    RawOption,
    announce,
    print_fields,
    print_table,
    printed,
    unescaped,
)
from flyball.cli.show.times import ago, clock, short
from flyball.contracts.clock import SystemClock

Json = dict[str, Any]
NEWEST = 5  # incidents and decisions beside a job or a host
RANKS_SHOWN = 64  # -o wide shows all

COMMAND = command_help(
    "Describe one job, host, incident, decision, action, signal or checkpoint: everything that is known about it. An "
    "incident is told as a story, in the order of time.",
    "flyball describe job llama",
    "flyball describe host host-b",
    "flyball describe incident inc-4",
    "flyball describe checkpoint llama -o json",
)


@with_supervisor(without=())
def command(
    *,
    kind: KindArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="its name: llama, host-b, inc-4, dec-17, ...")],
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
    raw: RawOption = False,
) -> None:
    """Read-only."""
    wanted = find_kind(kind)
    with choice.open_read_only(name if wanted.key == "job" else "") as client:
        found = _found(client, wanted, name)
    if not printed(found, output):
        with unescaped(raw):
            _print(wanted, found, output)


def _found(client: ApiClient, kind: ListedKind, name: str) -> Json:
    """The thing, for a job or a host with what belongs to it."""
    found = fetch(client, kind, name)
    if kind.name not in ("jobs", "hosts"):
        return found
    incidents = client.items("/v1/incidents", limit=NEWEST, **{kind.one: name})
    if kind.name == "hosts":
        return {"host": found, "incidents": incidents}
    return {
        "job": found,
        "checkpoints": {
            n: v for n, v in client.get("/v1/checkpoints", job=name, copies="false").items() if n != "copies"
        },
        "incidents": incidents,
        "decisions": client.items("/v1/decisions", limit=NEWEST, job=name),
    }


def _print(kind: ListedKind, found: Json, output: Format) -> None:
    now = SystemClock().wall_s()
    match kind.name:
        case "jobs":
            _print_job(found, now, output)
        case "hosts":
            _print_host(found, now)
        case "incidents":
            print_incident(found)
        case "decisions":
            print_decision(found)
        case "actions":
            print_action(found)
        case "checkpoints":
            print_fields({n: found[n] for n in ("job", "world_size", "newest_step", "recovery_point")})
            _print_tiers(found)
        case "signals":
            print_signal(found)
        case _:
            print_fields(found)


def _print_job(found: Json, now: float, output: Format) -> None:
    job, wide = found["job"], output is Format.WIDE
    spec = job.get("spec") or {}
    notes = filter(None, (outcome(job, now), hosts_note(job, wide=wide), save_note(job)))
    state, lasting, started, step, _, last_step, step_time, restarts = job_row(job, now)[1:]
    print_fields(
        {
            **{"job": job["job"], "state": state, "for": lasting, "started": started, "note": list(notes)},
            **{
                "newest step": step,
                "loss": loss_with_step(job),
                "last step": last_step,
                "a step": step_time,
                "restarts": restarts,
            },
            **{"ranks": job["world_size"], "generation": known(job["generation"])},
            **{"command": " ".join(spec.get("argv") or ()), "folder": spec.get("workdir")},
            **{"environment": sorted(spec.get("env") or ()), "policy": spec.get("policy")},
        }
    )
    ranks = job["ranks"] if wide else job["ranks"][:RANKS_SHOWN]
    rows = [
        [
            *(rank["rank"], rank["host_id"], rank["pid"], known(rank["step"]), rank["phase"]),
            *(ago(rank["reported_at"], now), _ending(rank)),
        ]
        for rank in ranks
    ]
    print_table("Ranks", ("rank", "host", "pid", "step", "phase", "reported", "ended by"), rows)
    if len(ranks) < len(job["ranks"]):
        announce(f"{len(job['ranks']) - len(ranks)} more ranks are not shown (-o wide shows all)")
    _print_tiers(found["checkpoints"])
    for name in ("incidents", "decisions"):
        _print_newest(name, found[name], now, about="job")


def _ending(rank: Json) -> str | None:
    if rank["signal_number"] is not None:
        return f"signal {rank['signal_number']}"
    return f"exit code {rank['exit_code']}" if rank["exit_code"] is not None else None


def _given(fields: Json) -> Json:
    """Those that have a value: most hosts have no drain and no check."""
    return {name: value for name, value in fields.items() if value}


def _print_host(found: Json, now: float) -> None:
    from ckpt_engine.rules.memory_plan import readable_size

    host = found["host"]
    drain, check = host.get("drain") or {}, host.get("check") or {}
    print_fields(
        {
            **{"host": host["host_id"], "state": host["state"], "for": ago(host["since"], now).removesuffix(" ago")},
            **{"reason": host["reason"], "job": host["job"], "ranks": host["ranks"]},
            **{"address": host["address"], "failure domain": host["failure_domain"]},
            **{"joined": clock(host["joined_at"], now), "last report": ago(host["last_report_at"], now)},
            **{"reports every": short(host["report_interval_s"]), "daemon": host["daemon_version"]},
            **{"engine": host["engine_address"], "unreachable peers": host["unreachable_peers"]},
            "copies": f"{host['copies']}, {readable_size(host['copies_size_bytes'])}",
            **_given({"drain": drain.get("state"), "drain reason": drain.get("reason")}),
            **_given({"check": check.get("state"), "check message": check.get("message")}),
        }
    )
    print_conditions([host], now)
    print_transports([host])
    _print_newest("incidents", found["incidents"], now, about="host")


def _print_tiers(checkpoints: Json) -> None:
    from ckpt_engine.rules.memory_plan import readable_size

    rows = [
        [
            *(tier, one["copies"], readable_size(one["size_bytes"])),
            *(known(one["newest_step"]), known(one["newest_complete_step"])),
        ]
        for tier, one in checkpoints["tiers"].items()
    ]
    point = known(checkpoints["recovery_point"])
    none = "hosts report none to resume from (those of a job that has ended: flyball ckpt ls)"
    title = none if point is None else f"a restart resumes from step {point}"
    print_table(f"Checkpoints: {title}", ("tier", "copies", "size", "newest step", "newest of all ranks"), rows)


def _print_newest(name: str, items: list[Json], now: float, *, about: str) -> None:
    """A table of the newest, without the column that is the same in all rows."""
    kind = next(one for one in KINDS if one.name == name)
    shown = [place for place, column in enumerate(kind.columns) if column != about]
    rows = ([row[place] for place in shown] for row in (kind.row(item, now) for item in items))
    print_table(f"Newest {name}", [kind.columns[place] for place in shown], rows)
