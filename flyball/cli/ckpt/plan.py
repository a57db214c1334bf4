"""`flyball ckpt plan`: where a restore would get every shard from, should hosts be lost."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyball.cli.ckpt.options import Folders, Generation, JobName, StateDir, StepName, look, parse_step
from flyball.cli.reach.options import SupervisorOption, TokenFileOption, connect, examples
from flyball.cli.show.output import Format, OutputOption, print_fields, print_json, print_table
from flyball.contracts import wire
from flyball.contracts.checkpoints import Lineage, ShardCopy
from flyball.contracts.errors import NotFound, RestoreFailed, UsageError
from flyball.contracts.recovery import NotUsable, Origin, complete_points

if TYPE_CHECKING:
    from ckpt_engine.inspect.restore_planner import ShardPlan, StepPlan
    from flyball.cli.ckpt.places import JobCopies

COMMAND: dict[str, Any] = {
    "help": "Say for every rank which copies a restore would try, in which order and for how long, or why it cannot. "
    "The copies are those found on this machine, or those that a supervisor knows (--supervisor, FLYBALL_SUPERVISOR).",
    "epilog": examples("flyball ckpt plan latest --lost host-b", "flyball ckpt plan 120 --lost host-a --lost host-b"),
}

_REASONS = {
    NotUsable.NO_COPY: "no copy",
    NotUsable.LOST_HOST: "on a lost host",
    NotUsable.UNREACHABLE: "on a host that cannot be asked",
    NotUsable.DEAD_LINEAGE: "given up by a restart",
    NotUsable.OTHER_GENERATION: "of another generation",
    NotUsable.OTHER_WORLD_SIZE: "of another world size",
    NotUsable.NOT_SEALED: "without world manifest",
}


@dataclass(frozen=True)
class Known:
    """What the plan is made from."""

    job: str
    copies: Sequence[ShardCopy]
    lineage: Lineage
    world_size: int
    home: Mapping[int, str]  # rank -> host that runs it
    sealed: set[tuple[int, int]] | None
    lost: frozenset[str] = frozenset()  # hosts that the supervisor has lost already

    @property
    def hosts(self) -> list[str]:
        return sorted({copy.host_id for copy in self.copies if copy.host_id} | set(self.home.values()))


def command(
    *,
    step: StepName,
    lost: Annotated[
        list[str] | None, typer.Option("--lost", metavar="HOST", help="plan as if this host were lost")
    ] = None,
    generation: Generation = None,
    state_dir: StateDir = "",
    folders: Folders = None,
    job: JobName = "",
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Nothing is changed. Exit code 23 if the step could not be restored."""
    from ckpt_engine.inspect.restore_planner import WantedWorld, plan_step

    wanted = parse_step(step)
    if supervisor or (os.environ.get("FLYBALL_SUPERVISOR") and not state_dir and not folders):
        known = _from_supervisor(job, supervisor, token_file)
        wanted = _newest(known) if wanted is None else wanted
    else:
        found = look(state_dir, folders, job)
        listing = found.inventory.find(wanted, generation)
        wanted, generation = listing.step, listing.generation
        known = _from_places(found, listing.world_size)
    unknown = sorted(set(lost or ()) - set(known.hosts))
    if unknown:
        raise NotFound(
            f"{', '.join(unknown)}: no such host of {known.job}.",
            hint=f"its hosts are {', '.join(known.hosts) or 'not known here'}",
        )
    plan = plan_step(
        wanted,
        [copy for copy in known.copies if generation in (None, copy.generation)],
        WantedWorld(known.world_size, known.home),
        lineage=known.lineage,
        lost_hosts={*known.lost, *(lost or ())},
        sealed=known.sealed,
    )
    if output is Format.JSON:
        print_json(_to_json(known.job, plan))
    else:
        _show(known.job, plan)
    if not plan.is_restorable:
        without = [str(shard.rank) for shard in plan.shards if not shard.sources]
        raise RestoreFailed(
            f"Step {plan.step} of {known.job} could not be restored: no usable copy of ranks {', '.join(without)}.",
            hint="`flyball ckpt ls` shows other steps; more replicas or a disk tier keep more copies",
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


def _from_supervisor(job: str, supervisor: str, token_file: str) -> Known:
    if "/" in job:
        raise UsageError(
            f"A supervisor knows the run that it started, and not {job} by its folder.",
            hint="name the job alone, or plan without the supervisor: give --dir or --state-dir",
        )
    with connect(supervisor, token_file, "") as client:
        if not job:
            names = [str(entry["job"]) for entry in client.items("/v1/jobs")]
            if len(names) != 1:
                raise NotFound(
                    f"The supervisor knows {len(names)} jobs: {', '.join(names)}.", hint="choose one with --job NAME"
                )
            job = names[0]
        placed = client.get(f"/v1/jobs/{job}")["ranks"]
        seen = client.get("/v1/checkpoints", job=job)
    copies = [wire.convert({k: v for k, v in c.items() if k != "reachable"}, ShardCopy) for c in seen["copies"]]
    return Known(
        job=job,
        copies=copies,
        lineage=wire.convert(seen["lineage"], Lineage),
        world_size=int(seen["world_size"]),
        home={int(rank["rank"]): str(rank["host_id"]) for rank in placed},
        sealed=None,  # engines report no others
        lost=frozenset(str(copy["host_id"]) for copy in seen["copies"] if not copy["reachable"]),
    )


def _newest(known: Known) -> int:
    points = complete_points(known.copies, known.lineage, known.world_size)
    if not points:
        raise NotFound(f"No step of {known.job} has a copy of every rank.", hint="wait for the first checkpoint")
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


def _show(job: str, plan: StepPlan) -> None:
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
        "Sources, in the order in which they are tried",
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
