"""`flyball inject campaign`: random faults against a running job, and a report of what became of each."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from flyball.cli.inject.agents import agents_of
from flyball.cli.inject.faults import Reach, reach_stack
from flyball.cli.reach.options import expand
from flyball.cli.reach.sources import get_job
from flyball.cli.show.given_times import parse_duration
from flyball.cli.show.output import Format, OutputOption, announce, print_fields, print_table, printed
from flyball.cli.signals import EndSignals
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.state_folder import clear_errors

if TYPE_CHECKING:
    from simulator.inject.campaign.outcome import CampaignReport

FAILED = 1  # exit code: faults were missed or handled wrong


class _CampaignOptions(NamedTuple):
    job: str
    mix: str
    rate_per_h: float
    duration_s: float
    seed: int
    overlap: bool
    patience_s: float


def _wanted(
    *,
    job: Annotated[str, typer.Option("--job", help="name of the job, started with --injectable")],
    mix: Annotated[
        str, typer.Option("--mix", help="llama3, workers, hosts, all, or faults with weights: kill=2,hang=1")
    ] = "llama3",
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="faults per hour, on average")] = 60.0,
    duration: Annotated[str, typer.Option("--duration", help="no fault is injected later, e.g. 30m")] = "10m",
    seed: Annotated[int, typer.Option("--seed", min=-1, help="draws the same faults again; -1: a new one")] = -1,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="do not wait for a fault's verdict: two may be without one at once")
    ] = False,
    patience: Annotated[
        str, typer.Option("--patience", help="for how long to wait for a detection, and for a recovery")
    ] = "3m",
) -> _CampaignOptions:
    drawn = secrets.randbelow(1_000_000) if seed < 0 else seed
    return _CampaignOptions(
        job,
        mix,
        rate,
        parse_duration("--duration", duration),
        drawn,
        overlap,
        parse_duration("--patience", patience),
    )


@expand("reach", reach_stack)
@expand("wanted", _wanted)
def campaign(
    *,
    report_file: Annotated[Path | None, typer.Option("--out", help="write the report as HTML")] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option("--agent", metavar="URL", help="inject through this agent; may be repeated (default: here)"),
    ] = None,
    agent_token_file: Annotated[str, typer.Option("--agent-token-file", help="file with the agents' token")] = "",
    output: OutputOption = Format.TABLE,
    wanted: _CampaignOptions,
    reach: Reach,
) -> int:
    """Exit code 1 if a fault was missed or handled wrong."""
    from simulator.inject.campaign.page import to_html

    announce(f"seed {wanted.seed}")
    with EndSignals(("SIGTERM", "SIGINT")) as signals:
        report, left = run_campaign(wanted, reach, signals, agents or [], agent_token_file)
    if report_file is not None:
        with clear_errors(report_file):
            report_file.write_text(to_html(report, command=_command(wanted)))
        announce(f"the report is in {report_file}")
    if not printed(msgspec.to_builtins(report) | {"summary": report.summary()}, output):
        print_report(report)
    if left is not None:
        raise left
    return signals.exit_code or (FAILED if report.failures else 0)


def run_campaign(
    wanted: _CampaignOptions, reach: Reach, signals: EndSignals, agents: list[str], agent_token_file: str
) -> tuple[CampaignReport, FlyballError | None]:
    """Run it, and undo all that it did. Also returns what could not be undone. Raises NotFound for an unknown mix or
    job, and what an agent answers before the first fault."""
    from simulator.inject.campaign.draws import draw_faults
    from simulator.inject.campaign.mixes import mix_of
    from simulator.inject.campaign.outcome import CampaignReport
    from simulator.inject.campaign.run import Campaign
    from simulator.inject.kinds.catalog import kind_of

    mix = mix_of(wanted.mix)
    for mixed in mix:
        kind_of(mixed.fault)
    draws = draw_faults(mix, rate_per_h=wanted.rate_per_h, duration_s=wanted.duration_s, seed=wanted.seed)
    announce(f"{len(draws)} faults in {wanted.duration_s:g} s; Ctrl-C ends the campaign and undoes what lasts")
    clock = SystemClock()
    report: CampaignReport | None = None
    try:
        with reach.open(wanted.job) as (client, injector):
            get_job(client, wanted.job)
            hands = agents_of(client, agents, agent_token_file) if agents else injector
            began_at = clock.wall_s()
            running = Campaign(
                client,
                hands,
                job=wanted.job,
                clock=clock,
                announce=announce,
                is_over=lambda: signals.count > 0,
                patience_s=wanted.patience_s,
                overlap=wanted.overlap,
            )
            try:
                outcomes, ended_early = running.run(draws)
                report = CampaignReport(
                    seed=wanted.seed,
                    job=wanted.job,
                    mix=wanted.mix,
                    rate_per_h=wanted.rate_per_h,
                    duration_s=wanted.duration_s,
                    began_at=began_at,
                    ended_at=clock.wall_s(),
                    faults=tuple(outcomes),
                    ended_early=ended_early,
                )
            finally:
                hands.undo_all()
    except FlyballError as error:
        if report is None:
            raise
        return report, error
    return report, None


def print_report(report: CampaignReport) -> None:
    """Print the report on stdout."""
    print_table(
        "Faults (seconds since the injection)",
        ("#", "fault", "target", "verdict", "detected as", "after", "decisions", "recovered", "lost", "why"),
        (
            [
                f.number,
                f.fault,
                f.target,
                f.verdict.value,
                f.detected_as,
                f"{f.detected_s:.1f}" if f.detected_s >= 0 else None,
                " + ".join(f.decisions).replace("_", " "),
                f"{f.recovered_s:.1f}" if f.recovered_s >= 0 else None,
                f.lost_steps,
                f.why,
            ]
            for f in report.faults
        ),
    )
    ended = {"ended early": report.ended_early} if report.ended_early else {}
    print_fields({"seed": report.seed, **report.summary(), **ended})


def _command(wanted: _CampaignOptions) -> str:
    overlap = " --overlap" if wanted.overlap else ""
    return (
        f"flyball inject campaign --job {wanted.job} --mix {wanted.mix} --rate {wanted.rate_per_h:g} "
        f"--duration {wanted.duration_s:g}s --seed {wanted.seed}{overlap}"
    )
