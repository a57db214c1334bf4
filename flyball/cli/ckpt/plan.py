"""`flyball ckpt plan`: where a restore would get every shard from, for example if hosts were lost."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyball.cli.ckpt.options import Generation, Selection, StepName, parse_step, with_selection
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import Format, OutputOption, print_fields, print_table, printed
from flyball.contracts import wire
from flyball.contracts.checkpoints import Lineage, ShardCopy
from flyball.contracts.errors import NotFound, RestoreFailed, UsageError
from flyball.contracts.recovery import NotUsable, Origin, complete_points

if TYPE_CHECKING:
    from ckpt_engine.rules.restore_planner import ShardPlan, StepPlan
    from flyball.cli.ckpt.places import JobCopies

COMMAND = command_help(
    "Show which copies a restore would try for every rank, and how long it would take. Considers the copies on this "
    "machine or, with --supervisor or FLYBALL_SUPERVISOR, those that the supervisor knows. Exit code 23 if the step "
    "could not be restored, with the reasons.",
    "flyball ckpt plan latest --lost host-b",
    "flyball ckpt plan 120 --lost host-a --lost host-b",
)

_REASONS = {
    NotUsable.NO_COPY: "no copy",
    NotUsable.LOST_HOST: "on a lost host",
    NotUsable.UNREACHABLE: "on an unreachable host",
    NotUsable.DEAD_LINEAGE: "given up by a restart",
    NotUsable.OTHER_GENERATION: "from another generation",
    NotUsable.OTHER_WORLD_SIZE: "from another world size",
    NotUsable.NOT_SEALED: "without a world manifest",
}


@dataclass(frozen=True)
class Known:
    """The input of the plan."""

    job: str
    copies: Sequence[ShardCopy]
    lineage: Lineage
    world_size: int
    home: Mapping[int, str]  # rank -> host that runs it
    sealed: set[tuple[int, int]] | None
    lost: frozenset[str] = frozenset()  # hosts that the supervisor cannot reach

    @property
    def hosts(self) -> list[str]:
        return sorted({copy.host_id for copy in self.copies if copy.host_id} | set(self.home.values()))


@with_supervisor(without=("state_dir", "database_url"))
@with_selection
def command(
    *,
    step: StepName,
    lost: Annotated[
        list[str] | None, typer.Option("--lost", metavar="HOST", help="plan as if this host were lost; repeatable")
    ] = None,
    generation: Generation = None,
    selection: Selection,
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Read-only."""
    from ckpt_engine.rules.restore_planner import WantedWorld, plan_step

    wanted = parse_step(step)
    if choice.url or (os.environ.get("FLYBALL_SUPERVISOR") and not selection.state_dir and not selection.folders):
        known = _from_supervisor(selection.job, choice)
        wanted = _newest(known) if wanted is None else wanted
    else:
        found = selection.find()
        listing = found.inventory.find(wanted, generation)
        wanted, generation = listing.step, listing.generation
        known = _from_places(found, listing.world_size)
    unknown = sorted(set(lost or ()) - set(known.hosts))
    if unknown:
        raise NotFound(
            f"{known.job} has no host {', '.join(unknown)}.",
            hint=f"its hosts are {', '.join(known.hosts) or 'unknown here'}",
        )
    plan = plan_step(
        wanted,
        [copy for copy in known.copies if generation in (None, copy.generation)],
        WantedWorld(known.world_size, known.home),
        lineage=known.lineage,
        lost_hosts={*known.lost, *(lost or ())},
        sealed=known.sealed,
    )
    if not printed(_to_json(known.job, plan), output):
        _print(known.job, plan)
    if not plan.is_restorable:
        without = [str(shard.rank) for shard in plan.shards if not shard.sources]
        raise RestoreFailed(
            f"Step {plan.step} of {known.job} could not be restored: no usable copy of ranks {', '.join(without)}.",
            hint="`flyball ckpt ls` lists other steps; more replicas or a disk tier give more copies",
        )


def _from_places(found: JobCopies, world_size: int) -> Known:
    configure = found.configure
    placed = configure.placement.hosts if configure else ()
    return Known(
        job=found.job,
        copies=[held.copy for held in found.inventory.held],
        lineage=found.inventory.lineage,
        world_size=world_size,
        home={rank: host.host_id for host in placed for rank in host.ranks},
        sealed=found.inventory.sealed,
    )


def _from_supervisor(job: str, choice: SupervisorChoice) -> Known:
    if "/" in job:
        raise UsageError(
            f"A supervisor knows only a job's current run, not {job}.",
            hint="name the job alone, or plan without the supervisor: use --dir or --state-dir",
        )
    with choice.connect() as client:
        if not job:
            names = [str(entry["job"]) for entry in client.items("/v1/jobs")]
            if len(names) != 1:
                raise NotFound(
                    f"The supervisor has {len(names)} jobs: {', '.join(names)}.", hint="choose one with --job NAME"
                )
            job = names[0]
        placed = client.get(f"/v1/jobs/{job}")["ranks"]
        answer = client.get("/v1/checkpoints", job=job)
    copies = [wire.convert({k: v for k, v in c.items() if k != "reachable"}, ShardCopy) for c in answer["copies"]]
    return Known(
        job=job,
        copies=copies,
        lineage=wire.convert(answer["lineage"], Lineage),
        world_size=int(answer["world_size"]),
        home={int(rank["rank"]): str(rank["host_id"]) for rank in placed},
        sealed=None,  # engines report only sealed steps
        lost=frozenset(str(copy["host_id"]) for copy in answer["copies"] if not copy["reachable"]),
    )


def _newest(known: Known) -> int:
    points = complete_points(known.copies, known.lineage, known.world_size)
    if not points:
        raise NotFound(f"No step of {known.job} has copies of all ranks.", hint="wait for the first checkpoint")
    return max(points)[0]


def _to_json(job: str, plan: StepPlan) -> dict[str, Any]:
    return {
        "job": job,
        "step": plan.step,
        "generation": plan.generation,
        "restorable": plan.is_restorable,
        "seconds": plan.seconds,
        "shards": [
            {
                "rank": shard.rank,
                "host_id": shard.home,
                "reason": shard.reason,
                "sources": [
                    {"origin": source.origin.name.lower(), "seconds": source.seconds, "copy": source.copy}
                    for source in shard.sources
                ],
                "unusable": shard.unusable,
            }
            for shard in plan.shards
        ],
    }


def _print(job: str, plan: StepPlan) -> None:
    print_fields(
        {
            "job": job,
            "step": plan.step,
            "generation": plan.generation,
            "can be restored": plan.is_restorable,
            "estimated seconds": f"{plan.seconds:.2g}" if plan.is_restorable else None,
        }
    )
    print_table(
        "Sources, in the order in which a restore tries them",
        ("rank", "runs on", "try", "from", "of host", "seconds"),
        (row for shard in plan.shards for row in _rows(shard)),
    )


def _rows(shard: ShardPlan) -> list[list[object]]:
    runs_on = shard.home or "elsewhere"
    rows: list[list[object]] = [
        [shard.rank, runs_on, order, _origin(source.origin), source.copy.host_id, f"{source.seconds:.2g}"]
        for order, source in enumerate(shard.sources, 1)
    ]
    if shard.reason is not None and not shard.unusable:
        rows.append([shard.rank, runs_on, None, _REASONS[shard.reason], None, None])
    rows += [
        [shard.rank, runs_on, None, f"not {left.copy.tier}: {_REASONS[left.reason]}", left.copy.host_id, None]
        for left in shard.unusable
    ]
    return rows


def _origin(origin: Origin) -> str:
    return origin.name.lower().replace("_", " ")
