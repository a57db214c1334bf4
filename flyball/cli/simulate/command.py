"""`flyball simulate`: run a scenario in simulated time, with the policy that decides in production."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flyball.cli.reach.options import command_help
from flyball.cli.show.output import Format, OutputOption, print_fields, print_table, printed
from flyball.cli.simulate import compare as simulate_compare
from flyball.cli.simulate import optimize as simulate_optimize
from flyball.cli.simulate import replay as simulate_replay
from flyball.cli.simulate import swarm as simulate_swarm
from flyball.cli.simulate import sweep as simulate_sweep
from flyball.cli.simulate.calibrate import Calibrate, calibration
from flyball.cli.simulate.options import Report, ScenarioName, Settings, check_can_write, seeds_from, write_report

if TYPE_CHECKING:
    from simulator.fleet.result import Result

app = typer.Typer(
    **command_help(
        "Simulate months of training on thousands of hosts in seconds, to plan spares, checkpoints and restarts. The "
        "policy, the detector, the playbook and the goodput account are those of production; see "
        "docs/reference/simulator.md.",
        "flyball simulate list",
        "flyball simulate describe llama3",
        "flyball simulate run llama3 --out llama3.html",
        "flyball simulate compare llama3 --set-b checkpoint.every_s=60",
        "flyball simulate sweep llama3 --vary cluster.spares=0,8,16,32",
        "flyball simulate optimize llama3",
        "flyball simulate run my-cluster.toml -o json",
        "flyball simulate swarm --seeds 1000",
    ),
    no_args_is_help=True,
)

app.command("compare", **simulate_compare.COMMAND)(simulate_compare.command)
app.command("optimize", **simulate_optimize.COMMAND)(simulate_optimize.command)
app.command("sweep", **simulate_sweep.COMMAND)(simulate_sweep.command)


@app.command(
    "list",
    **command_help("List the scenarios that Flyball ships.", "flyball simulate list", "flyball simulate list -o json"),
)
def list_scenarios(*, output: OutputOption = Format.TABLE) -> None:
    """The shipped scenarios, with their sizes."""
    from simulator.fleet import scenario

    found = {name: scenario.load(name) for name in scenario.shipped()}
    rows = [
        {"name": name, "about": one.about, "gpus": one.gpus, "nodes": one.job.nodes, "days": one.days}
        for name, one in found.items()
    ]
    if printed(rows, output):
        return
    print_table(
        "Scenarios",
        ("name", "GPUs", "days", "about"),
        ([name, f"{one.gpus:,}", f"{one.days:g}", one.about] for name, one in found.items()),
    )


@app.command(
    "describe",
    **command_help(
        "Show a scenario: its figures with their sources, and what each field means. Without a scenario, only the "
        "fields.",
        "flyball simulate describe llama3",
        "flyball simulate describe llama3 --file > my-cluster.toml",
        "flyball simulate describe",
    ),
)
def describe(
    name: Annotated[str, typer.Argument(metavar="[SCENARIO]", help="a shipped scenario, or a TOML file")] = "",
    *,
    settings: Settings = None,
    file: Annotated[bool, typer.Option("--file", help="print the file itself, to change a copy of it")] = False,
) -> None:
    """For people; `run -o json` has the figures for programs."""
    from simulator.fleet import scenario

    if file and name:
        typer.echo(scenario.read(name), nl=False)
        return
    if not name:
        fields = ([one.name, one.default or "(must be given)", one.meaning] for one in scenario.fields())
        print_table("Fields of a scenario", ("field", "default", "meaning"), fields)
        return
    one = scenario.load(name, settings or ())
    print_fields({"scenario": name, "about": one.about, "sources": list(one.sources), "length": f"{one.days:g} days"})
    for assumption in one.assumptions:
        print_fields({"assumes": assumption})
    values = one.model_dump(mode="json")
    rows = []
    for field in scenario.fields():
        section, _, key = field.name.partition(".")
        if key and section != "causes" and isinstance(values[section], dict):
            rows.append([field.name, values[section][key], field.meaning])
    print_table("Figures", ("field", "value", "meaning"), rows)
    per_day = 86_400.0
    print_table(
        "Causes",
        ("cause", "effect", "hits", "a day", "one per"),
        (
            [
                cause.name,
                cause.effect.value,
                f"{cause.reach.value} host" if cause.reach.value == "one" else cause.reach.value,
                f"{one.rate_per_s(cause) * per_day:.3f}" if not cause.at_s else f"{len(cause.at_s)} in all",
                f"{1.0 / rate / 3600.0:,.1f} h" if (rate := one.rate_per_s(cause)) > 0.0 else "-",
            ]
            for cause in one.causes
        ),
    )


@app.command(
    "run",
    **command_help(
        "Run a scenario, and report how much of the time became training. The same seed gives the same run. Exit "
        "code 1 if a check failed: a saved step was lost, time is missing, an incident stayed open, or too many hosts "
        "were cordoned.",
        "flyball simulate run small",
        "flyball simulate run llama3 --seed 7 --out llama3.html",
        "flyball simulate run llama3 --set cluster.spares=8 --set checkpoint.every_s=1800",
        "flyball simulate run llama3 --calibrate demo.json",
        "flyball simulate run my-cluster.toml --json > result.json",
    ),
)
def run(
    name: ScenarioName,
    *,
    seed: Annotated[int, typer.Option(min=0, help="the seed of all random streams")] = 1,
    settings: Settings = None,
    calibrate: Calibrate = "",
    report: Report = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """The seed is printed before anything else, so that a run that fails can be repeated."""
    from flyball.cli.show.progress import share_bar
    from simulator.fleet import scenario
    from simulator.fleet.result import simulate

    given = (*calibration(calibrate), *(settings or ()))
    chosen = scenario.load(name, given)
    check_can_write(report)
    seeds_from(seed, 1)
    with share_bar("simulating", chosen.length_s) as passed:
        done = simulate(chosen, seed, name, passed)
    if report is not None:
        from simulator.fleet.report import to_html

        write_report(to_html(done, chosen, given), report)
    if not printed(done.result, output):
        print_result(done.result)
    raise typer.Exit(1 if done.result.violations else 0)


def _length(days: float) -> str:
    from goodput.wording import seconds

    return f"{days:g} days" if days >= 1.0 else seconds(days * 86_400.0)


def print_result(result: Result) -> None:
    """A result for people."""
    from goodput.wording import percent, seconds

    account = result.goodput
    fields: dict[str, object] = {
        "scenario": f"{result.scenario}, {result.gpus:,} GPUs for {_length(result.days)}",
        "seed": result.seed,
        "useful": f"{percent(result.useful)} of the time"
        + (f" (Meta's closed form: {percent(result.closed_form_ettr)})" if result.closed_form_ettr is not None else ""),
        "ETTR": percent(account.ettr),
        "lost": f"{percent(1.0 - result.useful)}: recomputed {percent(result.recomputed)}, "
        f"saving {percent(result.saving)}, down {percent(result.down)}; {result.lost_gpu_hours:,.0f} GPU hours",
        "interruptions": f"{result.interruptions}, one per "
        + (seconds(result.days * 86_400.0 / result.interruptions) if result.interruptions else "-"),
        "recovery": f"{seconds(account.mttr_s)} on average, of which detection {seconds(account.mttd_s)}",
        "spares left": result.spares_left,
        "decisions": f"{result.decisions}, digest {result.digest[:16]}",
    }
    if result.outcome == "failed":
        fields["the job failed"] = f"after {seconds(result.failed_at_s)}: {result.message}"
    print_fields(fields)
    print_table(
        "Faults",
        ("cause", "effect", "faults", "expected", "interruptions"),
        (
            [
                cause.name,
                cause.effect,
                cause.faults,
                "-" if cause.expected is None else f"{cause.expected:.1f}",
                cause.interruptions,
            ]
            for cause in result.causes
        ),
    )
    for violation in result.violations:
        print_fields({"CHECK FAILED": violation})


@app.command(
    "check",
    **command_help(
        "Check a supervisor's database for broken invariants: after injected faults, or when it is in doubt. It is "
        "only read. Exit codes as of `swarm`.",
        "flyball simulate check --from-db sqlite:////var/lib/flyball/flyball.sqlite",
    ),
)
def check(
    *,
    from_db: Annotated[str, typer.Option("--from-db", help="URL of a supervisor's database")],
    bound_s: Annotated[
        float, typer.Option("--bound-s", min=0.0, help="seconds for which an incident may be open")
    ] = 600.0,
    output: OutputOption = Format.TABLE,
) -> None:
    """The checkers that need no more than a database, on a real one."""
    from flyball.contracts.clock import SystemClock
    from services.store.sql.database import open_existing
    from simulator.database_check import check_database
    from simulator.swarm.verdicts import EXIT_CODES, verdict

    db = open_existing(from_db)
    try:
        violations = check_database(db, now=SystemClock().wall_s(), bound_s=bound_s)
    finally:
        db.close()
    if not printed(violations, output):
        for violation in violations:
            typer.echo(str(violation))
        typer.echo(f"{len(violations)} violations")
    raise typer.Exit(EXIT_CODES[verdict(violations)])


app.command("swarm", **simulate_swarm.HELP)(simulate_swarm.swarm)
app.command("replay", **simulate_replay.HELP)(simulate_replay.replay)
