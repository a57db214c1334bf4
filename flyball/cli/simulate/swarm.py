"""`flyball simulate swarm`: many random small worlds, each with random faults, checked after every event."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from flyball.cli.reach.options import command_help
from flyball.cli.show.messages import announce, json_text
from flyball.cli.show.output import Format, OutputOption, print_fields, printed
from flyball.cli.show.progress import tally
from flyball.cli.simulate.options import Jobs, seeds_from, write_report
from flyball.contracts.errors import UsageError

if TYPE_CHECKING:
    from simulator.checks.record_checks import Violation
    from simulator.swarm.trials import ClusterTrial
    from simulator.swarm.tries import FailedSeed, SeedResult, Tried

SHOWN_VIOLATIONS = 5

HELP = command_help(
    "Hunt bugs of the supervisor: random small clusters and fleets with random faults, in simulated time, around the "
    "production code. Invariants are checked after every event. The first seed is printed first; a seed and a release "
    "always give the same run. A seed that fails is shrunk to the fewest faults, and printed with the command that "
    "repeats it. Exit code 40: the core crashed or logged an error; 42: correctness, something happened that must "
    "never; 41: liveness, something did not end that must. If seeds failed in several ways, the first of these counts.",
    "flyball simulate swarm --seeds 1000",
    "flyball simulate swarm --seeds 1000 --from-seed 5000 --jobs 4 -o json",
    "flyball simulate swarm --seeds 1 --from-seed 88 --story",
    "flyball simulate swarm --seeds 1 --from-seed 88 --faults 0,3",
)


def swarm(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds to try")] = 200,
    from_seed: Annotated[int, typer.Option("--from-seed", min=0, help="the first seed")] = 0,
    jobs: Jobs = 0,
    faults: Annotated[
        str,
        typer.Option("--faults", metavar="N,N", help="only these faults of the seed, by place from 0 on, or none"),
    ] = "",
    story: Annotated[
        bool, typer.Option("--story", help="tell a single seed: its faults, commands and decisions, in order")
    ] = False,
    traces: Annotated[
        Path | None, typer.Option("--traces", help="write the shrunk trace of each failed seed into this folder")
    ] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Results are printed as they come; their sum does not depend on their order."""
    from simulator.parallel import usable_cores
    from simulator.swarm.pool import try_seeds
    from simulator.swarm.tries import try_seed
    from simulator.swarm.verdicts import EXIT_CODES, worst

    kept = _places(faults, seeds)
    if story and seeds != 1:
        raise UsageError("--story tells one seed.", hint="add --seeds 1")
    refuse_story_for_programs(story, output)
    wanted = seeds_from(from_seed, seeds)
    told = _tell(from_seed, kept) if story else None
    results: list[SeedResult] = []
    try:
        tries = try_seeds(wanted, jobs=jobs or usable_cores(), kept=kept)
        if told is not None:
            tries = iter([try_seed(from_seed, kept, told)])
        for result in _shown(tries, seeds):
            results.append(result)
            if result.failure is not None:
                if traces is not None:
                    _write_trace(result.failure, traces)
                if not output.is_for_programs:
                    _complain(result.failure)
    except KeyboardInterrupt:
        failed = sum(result.failure is not None for result in results)
        announce(f"interrupted after {len(results)} seeds, of which {failed} failed")
        raise
    results.sort(key=lambda result: result.tried.seed)
    found = _summary(results, from_seed)
    if not printed(found, output):
        _print(found)
    raise typer.Exit(EXIT_CODES[worst(result.tried.verdict for result in results)])


class SwarmResult(msgspec.Struct, frozen=True):
    """What a swarm found; `-o json` prints it. `digest` is of the digests of all seeds, in their order."""

    schema: str
    version: str
    from_seed: int
    seeds: int
    failed: int
    verdicts: dict[str, int]
    invariants: dict[str, int]  # that broke -> in how many seeds
    worlds: dict[str, int]
    faults: int
    generations: int
    simulated_hours: float
    digest: str
    failures: list[object]


def _summary(results: Sequence[SeedResult], from_seed: int) -> SwarmResult:
    from flyball import __version__
    from simulator.swarm.traces import SWARM_SCHEMA, trace_of

    tried = [result.tried for result in results]
    invariants: Counter[str] = Counter()
    for one in tried:
        invariants.update({violation.invariant for violation in one.violations})
    failures = [result.failure for result in results if result.failure is not None]
    digest = hashlib.sha256("".join(one.digest for one in tried).encode()).hexdigest()
    return SwarmResult(
        schema=SWARM_SCHEMA,
        version=__version__,
        from_seed=from_seed,
        seeds=len(tried),
        failed=len(failures),
        verdicts=dict(sorted(Counter(one.verdict.value for one in tried).items())),
        invariants=dict(invariants.most_common()),
        worlds=dict(sorted(Counter(one.world for one in tried).items())),
        faults=sum(one.faults for one in tried),
        generations=sum(one.generations for one in tried),
        simulated_hours=sum(one.simulated_s for one in tried) / 3600.0,
        digest=digest,
        failures=[
            {
                "seed": one.seed,
                "verdict": one.tried.verdict.value,
                "violations": one.tried.violations,
                "fewest_faults": one.kept,
                "named_faults": one.named,
                "with_fewest": one.shrunk.violations,
                "repeat": one.repeat,
                "trace": trace_of(one.trace),
            }
            for one in failures
        ],
    )


def _places(faults: str, seeds: int) -> tuple[int, ...] | None:
    from simulator.swarm.tries import NO_FAULT

    if not faults:
        return None
    if seeds != 1:
        raise UsageError("--faults names faults of one seed.", hint="add --seeds 1")
    if faults == NO_FAULT:
        return ()
    try:
        return tuple(sorted({int(place) for place in faults.split(",")}))
    except ValueError:
        raise UsageError(f"--faults {faults} is no list of places.", hint="write for example --faults 0,3") from None


def _shown(results: Iterator[SeedResult], seeds: int) -> Iterator[SeedResult]:
    """Pass results through under a progress bar."""
    failed = 0
    with tally("seeds", seeds) as show:
        for result in results:
            failed += result.failure is not None
            show(1, f"{failed} failed")
            yield result


def _tell(seed: int, kept: Sequence[int] | None) -> Tried | None:
    """Tell a seed's story, and return how it went; None: a fleet does not run for that."""
    from simulator.swarm.story import fleet_in_words
    from simulator.swarm.trials import FleetTrial, draw, only

    trial = draw(seed)
    trial = trial if kept is None else only(trial, kept)
    if isinstance(trial, FleetTrial):
        for line in fleet_in_words(trial):
            typer.echo(line)
        return None
    return try_cluster(trial, tells=True)


def try_cluster(trial: ClusterTrial, *, tells: bool) -> Tried:
    """Run a small cluster, and tell its story if wanted."""
    from simulator.swarm.story import story_of
    from simulator.swarm.tries import run_cluster, tried_of

    done = run_cluster(trial)
    for line in story_of(done) if tells else ():
        typer.echo(line)
    return tried_of(done)


def refuse_story_for_programs(story: bool, output: Format) -> None:
    """Raises UsageError: a story before a document is no document."""
    if story and output.is_for_programs:
        raise UsageError(f"--story is for people, and -o {output.value} for programs.", hint="give one of them")


def _write_trace(failure: FailedSeed, folder: Path) -> None:
    from simulator.swarm.traces import trace_of

    folder.mkdir(parents=True, exist_ok=True)
    write_report(json_text(trace_of(failure.trace)), folder / f"seed-{failure.seed}.json")


def _complain(failure: FailedSeed) -> None:
    typer.echo(f"seed {failure.seed}: {failure.tried.verdict.value}")
    print_violations(failure.shrunk.violations)
    number = len(failure.kept)
    what = f"{number} of {failure.tried.faults} faults" if number else "without a fault"
    typer.echo(f"  shrunk to {what}{': ' if number else ''}{'; '.join(failure.named)}")
    typer.echo(f"  repeat: {failure.repeat}")


def print_violations(violations: Sequence[Violation]) -> None:
    """The first few."""
    for violation in violations[:SHOWN_VIOLATIONS]:
        typer.echo(f"  {violation}")
    if len(violations) > SHOWN_VIOLATIONS:
        typer.echo(f"  and {len(violations) - SHOWN_VIOLATIONS} more")


def _print(found: SwarmResult) -> None:
    print_fields(
        {
            "seeds": f"{found.seeds}, {found.failed} failed",
            "worlds": ", ".join(f"{count} of the kind {world}" for world, count in found.worlds.items()),
            "simulated": f"{found.simulated_hours:,.1f} hours, {found.faults} faults, {found.generations} generations",
            **({"broken": found.invariants} if found.invariants else {}),
            "digest": found.digest[:16],
        }
    )
