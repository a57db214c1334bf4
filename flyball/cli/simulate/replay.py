"""`flyball simulate replay`: the faults of a trace, or the incidents of a real job's event log, in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer

from flyball.cli.reach.options import command_help
from flyball.cli.show.messages import announce
from flyball.cli.show.output import Format, OutputOption, print_fields, printed
from flyball.cli.simulate.options import Settings, seeds_from
from flyball.cli.simulate.swarm import print_violations, refuse_story_for_programs, try_cluster
from flyball.contracts.errors import UsageError

if TYPE_CHECKING:
    from simulator.swarm.incident_log import LoggedRun
    from simulator.swarm.trials import ClusterTrial, FleetTrial, Trial
    from simulator.swarm.tries import Tried

HELP = command_help(
    "Replay a trace in simulated time: the faults of a seed that failed (`swarm --traces`), or the incidents of a real "
    "job's event log, at their moments. A log gives hosts, steps and restart times too; with --set, it answers what "
    "another figure would have changed. Exit codes as of `swarm`.",
    "flyball simulate replay traces/seed-4711.json",
    "flyball simulate replay traces/seed-4711.json --story",
    "flyball simulate replay events.jsonl --job llama --set cluster.spares=4",
)


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="a trace of a swarm (JSON), or an event log (JSONL)")],
    *,
    job: Annotated[str, typer.Option("--job", help="the job of an event log that has several")] = "",
    settings: Settings = None,
    seed: Annotated[int, typer.Option(min=0, help="for an event log: the seed of what it does not say")] = 1,
    story: Annotated[
        bool, typer.Option("--story", help="tell the faults, commands and decisions of a small cluster, in order")
    ] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """The seed is printed first."""
    from simulator.swarm.traces import read_trace
    from simulator.swarm.trials import ClusterTrial

    refuse_story_for_programs(story, output)
    read = read_trace(trace)
    if story and (read is None or not isinstance(read.trial, ClusterTrial)):
        raise UsageError("--story tells small clusters, and this is a fleet.", hint="leave --story away")
    if read is None:
        logged = _logged(trace, job, seed)
        seeds_from(seed, 1)
        _replay_fleet(logged.trial, settings or (), output, logged)
        return
    announce(f"seed {read.trial.seed}, written by release {read.version}")
    if not isinstance(read.trial, ClusterTrial):
        _replay_fleet(read.trial, settings or (), output, None)
        return
    if settings:
        raise UsageError("--set is for fleets, and this is a trace of a small cluster.", hint="edit the trace")
    _replay_cluster(read.trial, tells=story, output=output)


def _replay_cluster(trial: ClusterTrial, *, tells: bool, output: Format) -> None:
    tried = try_cluster(trial, tells=tells)
    _end(trial, tried, f"cluster, {trial.scenario.nodes} hosts and {trial.scenario.spares} spares", output)


def _end(trial: Trial, tried: Tried, world: str, output: Format) -> NoReturn:
    """Print how it went, and exit with its code."""
    from simulator.swarm.verdicts import EXIT_CODES

    if not printed(tried, output):
        print_fields(
            {
                "world": world,
                "faults": list(trial.named()),
                "simulated": f"{tried.simulated_s:.1f} s, {tried.generations} generations",
                "verdict": tried.verdict.value,
                "digest": tried.digest[:16],
            }
        )
        print_violations(tried.violations)
    raise typer.Exit(EXIT_CODES[tried.verdict])


class LogReplay(msgspec.Struct, frozen=True):
    """An event log's figures beside those of its replay; `-o json` prints it."""

    logged_goodput: float | None
    logged_incidents: int
    replayed_incidents: int
    left_out: tuple[str, ...]  # causes that are not replayed
    simulation: object  # as of `flyball simulate run`


def _replay_fleet(
    trial: FleetTrial, settings: list[str] | tuple[str, ...], output: Format, of: LoggedRun | None
) -> None:
    from flyball.cli.simulate.command import print_result
    from goodput.wording import percent
    from simulator.checks.record_checks import Violation
    from simulator.swarm.tries import run_fleet, tried_fleet
    from simulator.swarm.verdicts import EXIT_CODES

    scenario = trial.with_moments(settings)
    result = run_fleet(scenario, trial.seed, "replay")
    tried = tried_fleet(trial, scenario, result)
    if isinstance(result, Violation):
        _end(trial, tried, f"fleet, {scenario.job.nodes} hosts and {scenario.cluster.spares} spares", output)
    report = of.analysis.report if of is not None else None
    shown: object = result
    if of is not None and report is not None:
        shown = LogReplay(report.goodput, len(report.incidents), len(trial.faults), of.left_out, result)
    if not printed(shown, output):
        if of is not None and report is not None:
            left_out = f"; not replayed: {', '.join(of.left_out)}" if of.left_out else ""
            print_fields(
                {
                    "log": f"{percent(report.goodput)} useful, {len(report.incidents)} incidents",
                    "replayed": f"{len(trial.faults)} incidents as faults{left_out}",
                    "assumed": " ".join(trial.scenario["assumptions"]),
                }
            )
        print_result(result)
    raise typer.Exit(EXIT_CODES[tried.verdict])


def _logged(path: Path, job: str, seed: int) -> LoggedRun:
    from goodput.read.importers import registry
    from simulator.swarm.incident_log import from_events

    read = registry.read([path])
    if read.malformed_count:
        first = f"; the first: {read.malformed[0]}" if read.malformed else ""
        announce(f"{read.malformed_count} lines of {path} are left out{first}")
    return from_events(read.events, job or None, seed)
