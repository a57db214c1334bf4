"""`flyball goodput report`: how much of the elapsed time became training, and what took the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flyball.cli.goodput.options import (
    BinsOption,
    Method,
    MethodOption,
    OutOption,
    PeakFlopsOption,
    ReferenceOption,
    ReportFormat,
    ReportFormatOption,
    StepFlopsOption,
    choose_format,
    write_out,
)
from flyball.cli.goodput.query import with_query
from flyball.cli.goodput.sources import AUTO, Found, Query, announce_skipped, find, refuse_supervisor
from flyball.cli.reach.options import command_help
from flyball.cli.show.output import NO_LIMIT, cell, document, room
from flyball.contracts.errors import UsageError

if TYPE_CHECKING:
    from goodput.calculator import GoodputReport

TIMELINE_BINS = 240  # in the HTML report: about three pixels each

COMMAND = command_help(
    "Report a run's goodput and where the rest of its time went. Reads event logs, or asks a supervisor.",
    "flyball goodput report --job llama",
    "flyball goodput report events.jsonl --from 24h -o json",
    "flyball goodput report --job llama --gpu-hour-price 2.5 --out llama.html",
    "flyball goodput report nvrx.log --method google-resiliency --reference-step-time 1.5",
)


@with_query()
def command(
    *,
    query: Query,
    output: ReportFormatOption = None,
    out: OutOption = None,
    method: MethodOption = Method.FLYBALL,
    reference_step_time: ReferenceOption = None,
    model_flops_per_step: StepFlopsOption = None,
    peak_flops_per_gpu: PeakFlopsOption = None,
    timeline_bins: BinsOption = 0,
) -> None:
    """The table is a summary; -o json, csv and html have the whole report."""
    chosen = choose_format(output, out)
    options = msgspec.structs.replace(
        query.options,
        reference_step_s=reference_step_time,
        model_flops_per_step=model_flops_per_step,
        peak_flops_per_gpu=peak_flops_per_gpu,
    )
    query = msgspec.structs.replace(query, options=options)
    if method is Method.GOOGLE_RESILIENCY:
        write_out(google_text(query, chosen), out)
        return
    found = find(query, bins=TIMELINE_BINS if chosen is ReportFormat.HTML else timeline_bins)
    write_out(render(found, chosen, width=NO_LIMIT if out else room()), out)


def render(found: Found, chosen: ReportFormat, *, width: int) -> str:
    """The report in the chosen format."""
    from goodput.show.report import to_json, to_text

    report: GoodputReport = found.report
    match chosen:
        case ReportFormat.JSON | ReportFormat.YAML:
            with_timeline = {"timeline": msgspec.to_builtins(found.timeline)} if found.timeline else {}
            return document(to_json(report) | with_timeline, chosen)
        case ReportFormat.CSV:
            from goodput.show.csv_report import report_csv

            return report_csv(report)
        case ReportFormat.HTML:
            from goodput.show.html_report import to_html

            return to_html(report, found.timeline, source=found.source, left_out=found.left_out)
        case ReportFormat.TABLE:
            return to_text(report, width=width)


def google_text(query: Query, chosen: ReportFormat) -> str:
    """The result of the calculator of Google's resiliency library, with its keys. Raises UsageError, NotFound."""
    from goodput.account.google_resiliency import measure
    from goodput.read.event_files import MalformedLines
    from goodput.read.importers.registry import read_entries

    if not query.logs:
        raise UsageError("--method google-resiliency needs that library's log files.", hint="name them")
    if chosen in (ReportFormat.CSV, ReportFormat.HTML):
        raise UsageError(f"--method google-resiliency cannot write {chosen}.", hint="use -o json, or --method flyball")
    refuse_supervisor(query)
    options = query.options
    unsupported = {
        "--from": query.since,
        "--to": query.until,
        "--gpu-hour-price": options.gpu_hour_price,
        "--gpus": options.gpus,
        "--model-flops-per-step": options.model_flops_per_step,
        "--peak-flops-per-gpu": options.peak_flops_per_gpu,
        "--map": query.log_map or None,
        "--format": None if query.log_format in (AUTO, Method.GOOGLE_RESILIENCY) else query.log_format,
    }
    for flag, value in unsupported.items():
        if value is not None:
            raise UsageError(
                f"--method google-resiliency does not support {flag}.", hint="leave it out, or use --method flyball"
            )
    refusals = MalformedLines(strict=query.strict)
    entries = list(read_entries(query.logs, refusals))
    announce_skipped(refusals.count, refusals.named)
    found = measure(entries, reference_step_time_s=query.options.reference_step_s, job=query.job or None)
    if chosen is not ReportFormat.TABLE:
        return document(found, chosen)
    fields = msgspec.structs.asdict(found)
    width = max(map(len, fields))
    return "\n".join(f"{name.ljust(width)}  {cell(value)}" for name, value in fields.items())
