"""The report of a simulated run as one HTML file: the answer first, then the production account of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from goodput.account.timeline_bins import binned
from goodput.show import html_report
from goodput.show.page import environment
from goodput.wording import percent
from simulator.fleet.result import Result, Simulated
from simulator.fleet.scenario import FleetScenario

_BINS = 120


def to_html(done: Simulated, scenario: FleetScenario, settings: Sequence[str]) -> str:
    """The whole page. `settings` were set over the scenario's file."""
    result, line = done.result, done.analysis.timeline
    preface = (
        environment("simulator.fleet")
        .get_template("preface.html")
        .render(
            result=result,
            answer=_answer(result),
            causes=sorted(result.causes, key=lambda cause: -cause.faults),
            settings=list(_settings(scenario)),
            sources=scenario.sources,
        )
    )
    with_settings = f" with {', '.join(settings)}" if settings else ""
    return html_report.to_html(
        result.goodput,
        binned(line.intervals, line.start, line.end, _BINS),
        source=f"the scenario {result.scenario}{with_settings}, seed {result.seed}, digest {result.digest[:16]}",
        heading=f"Simulation of {result.scenario}: {result.gpus:,} GPUs for {result.days:g} days",
        preface=Markup(preface),
        assumptions=(
            *scenario.assumptions,
            "The policy, the detector, the playbook and this account are the production code. Hosts, faults, repairs "
            "and the times of the scenario are simulated.",
        ),
    )


def _answer(result: Result) -> str:
    lost = {"down": result.down, "recomputed": result.recomputed, "saving": result.saving}
    worst = max(lost, key=lambda name: lost[name])
    text = (
        f"{percent(result.useful)} of the time became training that counts. {result.interruptions} faults stopped it, "
        f"and cost {result.lost_gpu_hours:,.0f} GPU hours: {percent(result.down)} down, {percent(result.recomputed)} "
        f"recomputed, {percent(result.saving)} saving. The largest part is {worst}."
    )
    if result.closed_form_ettr is not None:
        text += f" Meta's closed form gives {percent(result.closed_form_ettr)} for the same rate and restart time."
    left = result.spares_left
    return f"{text} {left} spare{' is' if left == 1 else 's are'} left at the end."


def _settings(scenario: FleetScenario) -> Iterator[tuple[str, str]]:
    for section in ("job", "cluster", "checkpoint", "times"):
        for name, value in getattr(scenario, section).model_dump().items():
            for inner, one in value.items() if isinstance(value, dict) else [("", value)]:
                label = f"{section}.{name}.{inner}".rstrip(".")
                yield label, f"{one:g}" if isinstance(one, int | float) else str(one)
