"""`flyball goodput predict`: expected goodput and best save interval, from a past run or from given numbers."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Annotated

import typer

from flyball.cli.goodput.query import with_query
from flyball.cli.goodput.sources import Query, find
from flyball.cli.reach.options import command_help
from flyball.cli.show.output import Format, OutputOption, print_fields, print_table, printed
from flyball.contracts.errors import UsageError
from goodput.predict.recommendation import Recommendation

if TYPE_CHECKING:
    from goodput.calculator import GoodputReport
    from goodput.predict.outlook import Outlook
    from goodput.predict.prediction import PredictedTier

COMMAND = command_help(
    "Predict goodput and the best checkpoint interval, from measurements of a run or from numbers that you "
    "give. Numbers that you give replace the measured ones.",
    "flyball goodput predict events.jsonl",
    "flyball goodput predict --job llama --restart-s 5",
    "flyball goodput predict --nodes 2048 --failures-per-1000-node-days 6.5 --restart-s 300 --interval-s 3600 "
    "--save-s 30",
    "flyball goodput predict --mtti-s 6500 --restart-s 20 --step-s 2 --tier memory:0.05:1:0.7 "
    "--tier peer:0.1:5:0.95 --tier persistent:20:120:1:60",
)

NOTHING_MEASURED = Recommendation(text="")

Seconds = float | None


@with_query(without=("gpu_hour_price", "gpus", "window", "all_runs"))
def command(
    *,
    query: Query,
    nodes: Annotated[int | None, typer.Option(min=1, help="number of hosts of the job")] = None,
    failures_per_1000_node_days: Annotated[
        float | None, typer.Option(min=0.0, help="failure rate of the hosts; needs --nodes")
    ] = None,
    mtti_s: Annotated[
        Seconds, typer.Option(help="mean seconds between interruptions, instead of --nodes and the failure rate")
    ] = None,
    restart_s: Annotated[
        Seconds,
        typer.Option(min=0.0, help="seconds from a fault to the next step; with --tier, without the restore"),
    ] = None,
    interval_s: Annotated[Seconds, typer.Option(help="current seconds between two saves")] = None,
    save_s: Annotated[Seconds, typer.Option(min=0.0, help="seconds for which one save blocks training")] = None,
    step_s: Annotated[Seconds, typer.Option(help="seconds per step; intervals are then whole steps")] = None,
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="NAME:SAVE_S:RESTORE_S:SURVIVES[:READY_AFTER_S]",
            help="a tier: seconds per save and restore, and the share of interruptions its copies survive; repeatable",
        ),
    ] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Without a log, --job or a failure rate, measures the supervisor's only job."""
    from goodput.predict.outlook import Assumptions, outlook
    from goodput.predict.prediction import job_mtti_s

    if (nodes is None) != (failures_per_1000_node_days is None):
        raise UsageError("--nodes and --failures-per-1000-node-days go together.", hint="give both, or --mtti-s")
    if nodes is not None and failures_per_1000_node_days is not None:
        if mtti_s is not None:
            raise UsageError("--mtti-s and --nodes both set how often the job is interrupted.", hint="give one of them")
        mtti_s = job_mtti_s(nodes, failures_per_1000_node_days)
    report: GoodputReport | None = None
    if mtti_s is None or query != Query():  # else no run is involved
        report = find(query).report
    recommendation = report.recommendation if report else None
    measured = recommendation or NOTHING_MEASURED
    mtti_s, repair_s = _first(mtti_s, measured.mtti_s), _first(restart_s, measured.repair_s)
    if mtti_s is not None and repair_s is None:
        raise UsageError("How long a restart takes is unknown: the run had none.", hint="give --restart-s")
    found = outlook(
        Assumptions(
            mtti_s=mtti_s,
            repair_s=repair_s,
            interval_s=_first(interval_s, _save_interval_s(measured)),
            save_s=_first(save_s, measured.save_blocked_s),
            step_s=_first(step_s, measured.step_s),
            tiers=tuple(_tier(tier) for tier in tiers or ()),
            restore_s=_restore_s(report) if restart_s is None else 0.0,
        ),
        recommendation,
    )
    if not printed(found, output):
        _print(found)


def _first(given: float | None, measured: float | None) -> float | None:
    return measured if given is None else given


def _restore_s(report: GoodputReport | None) -> float:
    """Mean seconds that the measured restarts spent on restoring."""
    restore = report.repair.get("restore") if report else None
    return 0.0 if restore is None else restore.mean_s or 0.0


def _save_interval_s(measured: Recommendation) -> float | None:
    if measured.saved_every_steps is None or measured.step_s is None:
        return None
    return measured.saved_every_steps * measured.step_s


def _tier(text: str) -> PredictedTier:
    from goodput.predict.prediction import PredictedTier

    name, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
        if not name or len(values) not in (3, 4):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--tier {text} is not a tier.",
            hint="write NAME:SAVE_S:RESTORE_S:SURVIVES[:READY_AFTER_S], for example memory:0.05:1:0.7",
        ) from None
    return PredictedTier(name, *values)


def _print(found: Outlook) -> None:
    from goodput.wording import percent, points, seconds

    assumed, measured = found.assumptions, found.recommendation
    fields: dict[str, object] = {
        "interrupted every": _interrupted_every(assumed.mtti_s, measured),
        "restart takes": seconds(assumed.repair_s),
        "a save blocks": seconds(assumed.save_s),
        "saved every": seconds(assumed.interval_s),
    }
    if assumed.mtti_s is not None:
        fields["expected goodput"] = (
            f"{percent(found.goodput)} (ETTR by Meta's closed form: {percent(found.ettr)}, "
            "which counts time blocked by saves as lost)"
        )
        fields["best interval"] = "- (give --save-s, the seconds that a save blocks)"
    if found.best_interval_s is not None:
        steps = f", {found.best_interval_steps} steps" if found.best_interval_steps is not None else ""
        fields |= {
            "best interval": f"{seconds(found.best_interval_s)}{steps} (Young {seconds(found.young_interval_s)}, "
            f"Daly {seconds(found.daly_interval_s)})",
            "goodput with it": f"{percent(found.goodput_at_best)} ({points(found.gain)})",
        }
    print_fields(fields)
    if found.tiers is not None:
        has_steps = assumed.step_s is not None
        print_table(
            "Tiers",
            ("tier", "save every", *(["steps"] if has_steps else []), "restores"),
            (
                [
                    tier.name,
                    "not worth it" if tier.interval_s is None else seconds(tier.interval_s),
                    *([tier.interval_steps] if has_steps else []),
                    f"{100 * tier.restores_share:.0f}%",
                ]
                for tier in found.tiers.tiers
            ),
        )
        print_fields({"goodput with these tiers": percent(found.tiers.goodput)})
    if measured is not None:
        print_fields({"measured": measured.text})
    for note in found.notes:
        print_fields({"note": note})


def _interrupted_every(mtti_s: float | None, measured: Recommendation | None) -> str:
    from goodput.wording import seconds

    if mtti_s is not None:
        return seconds(mtti_s)
    if measured is None or measured.mtti_at_least_s is None:
        return "- (give --mtti-s)"
    return (
        f"never so far; {seconds(measured.mtti_at_least_s)} or more, with 97.5% confidence "
        f"(to predict, give --mtti-s and --restart-s, for example --mtti-s {ceil(measured.mtti_at_least_s)})"
    )
