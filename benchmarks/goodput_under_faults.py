"""Compares goodput while workers fail: `flyball run` against torchrun with `dcp.async_save`.

    python benchmarks/goodput_under_faults.py                  a table
    python benchmarks/goodput_under_faults.py --json           one JSON object on stdout, progress on stderr
    python benchmarks/goodput_under_faults.py --minutes 5 --repeats 3 --seed 7

One job (a small GPT, two ranks, gloo, CPU; forward, backward, AdamW), and one list of faults drawn from the seed. Both
sides train the job alternately. They get the same faults at the same offsets after their first step, and save to the
same disk at the same interval: --save-every, or Young's interval for the list's fault rate and the measured cost of a
`dcp.async_save`. The goodput calculator judges both event logs. docs/explanation/goodput-benchmark.md describes the
comparison.

It takes about repeats x 2 x (minutes + 0.5) + 1 minutes. Run it on an otherwise idle machine.

Exit codes: 0; 1 if a side could not be measured, or ended early; 2 for wrong arguments; 7 for too little memory; 130 if
interrupted. No process is left behind in any case.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402 - the line above makes the rest importable
import psutil  # noqa: E402
from goodput_bench import runs  # noqa: E402
from goodput_bench.faults import DEFAULT_KINDS, Fault, FaultKind, draw  # noqa: E402
from goodput_bench.figures import (  # noqa: E402
    RunFigures,
    SideFigures,
    Spread,
    reference_step_s,
    run_figures,
    side_figures,
)
from goodput_bench.live_job import STOP_SIGNALS  # noqa: E402
from goodput_bench.saves import Interval, best_interval  # noqa: E402
from goodput_bench.sides import WORLD_SIZE, Job, Side  # noqa: E402
from restart import NEEDED_BYTES, machine  # noqa: E402
from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from flyball.contracts.errors import FlyballError, UsageError  # noqa: E402
from goodput.wording import percent, seconds  # noqa: E402

SCHEMA = "flyball.benchmark.goodput_under_faults.v1"
TORCHRUN_KILL_AFTER_S = 30.0  # SIGTERM to SIGKILL when torchrun restarts; it has no option for that


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--minutes", type=float, default=3.0, help="length of training, from the first step on (3)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side, alternating (2)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the list of faults (1)")
    parser.add_argument(
        "--faults",
        nargs="+",
        type=FaultKind,
        choices=list(FaultKind),
        default=list(DEFAULT_KINDS),
        metavar="KIND",
        help=f"kinds of faults: {', '.join(FaultKind)} (all but freeze)",
    )
    parser.add_argument(
        "--gap-s", nargs=2, type=float, default=(20.0, 30.0), metavar=("MIN", "MAX"), help="time between faults (20 30)"
    )
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="save every STEPS, not at Young's interval")
    parser.add_argument(
        "--hang-timeout-s", type=float, default=10.0, help="timeout of the training's process group, on both sides (10)"
    )
    parser.add_argument("--step-floor-s", type=float, default=0.1, help="the least duration of a step (0.1)")
    parser.add_argument("--width", type=int, default=128, help="width of the model (128)")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model (6)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for checkpoints and logs")
    options = parser.parse_args()
    if options.minutes <= 0 or options.repeats < 1 or (options.save_every or 1) < 1 or options.hang_timeout_s <= 0:
        parser.error("--minutes, --repeats, --save-every and --hang-timeout-s must be above 0")
    if not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is not a folder")
    return options


def main() -> int:
    options = parse()
    available = psutil.virtual_memory().available
    if available < NEEDED_BYTES:
        log(f"{available >> 20} MiB of memory are free; the benchmark needs {NEEDED_BYTES >> 20} MiB.")
        return 7
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        return compare(options)
    except KeyboardInterrupt:
        log("interrupted; every process that it started has ended")
        return 130
    except FlyballError as error:
        log(f"{error.message}\n{error.hint}")
        return 2 if isinstance(error, UsageError) else 1


def compare(options: argparse.Namespace) -> int:
    before = machine()
    faults = draw_faults(options)
    job = Job(
        every_steps=options.save_every or runs.CALIBRATION_EVERY_STEPS,
        hang_timeout_s=options.hang_timeout_s,
        step_floor_s=options.step_floor_s,
        width=options.width,
        layers=options.layers,
    )
    interval = choose_interval(options, job, faults)
    job = msgspec.structs.replace(job, every_steps=interval.every_steps)
    log(f"{len(faults)} faults; both save every {interval.every_steps} steps")
    measured: dict[Side, list[RunFigures]] = {side: [] for side in Side}
    unmeasured: list[str] = []
    for repetition in range(1, options.repeats + 1):
        for side in Side if repetition % 2 else reversed(Side):
            try:
                observed = runs.run(side, job, faults, length_s=options.minutes * 60.0, parent=options.folder)
            except runs.RunFailed as error:
                unmeasured.append(f"{side}, repetition {repetition}: {error.message}")
                log(unmeasured[-1])
                continue
            found = run_figures(observed, repetition)
            measured[side].append(found)
            log(
                f"{repetition}/{options.repeats} {side}: goodput {found.goodput:.3f}, {found.faults_met} of "
                f"{len(faults)} faults met, load {found.load_average}"
            )
            failed = f"{found.saves_failed} saves failed" if found.saves_failed else ""
            for line in (*found.faults_missed, failed, found.failure):
                if line:
                    log(f"{side}: {line}")
    all_runs = [run for side in Side for run in measured[side]]
    figures = {side: side_figures(all_runs, side) for side in Side if measured[side]}
    if options.json:
        result = {
            "schema": SCHEMA,
            "machine": before,
            "settings": settings(options),
            "faults": faults,
            "interval": interval,
            **{side.value: figures.get(side) for side in Side},
            "reference_step_s": reference_step_s(all_runs) if all_runs else None,
            "runs": all_runs,
            "unmeasured": unmeasured,
        }
        print(json.dumps(result, default=msgspec.to_builtins))
    else:
        print_table(figures, faults, interval, options.repeats)
    return 1 if unmeasured or any(found.failures for found in figures.values()) else 0


def draw_faults(options: argparse.Namespace) -> tuple[Fault, ...]:
    """Raises UsageError if no fault fits."""
    return draw(
        options.seed,
        length_s=options.minutes * 60.0,
        kinds=options.faults,
        gap_s=(options.gap_s[0], options.gap_s[1]),
        longer_s={
            FaultKind.HANG: options.hang_timeout_s,
            FaultKind.FREEZE: options.hang_timeout_s + TORCHRUN_KILL_AFTER_S,
        },
        world_size=WORLD_SIZE,
    )


def choose_interval(options: argparse.Namespace, job: Job, faults: tuple[Fault, ...]) -> Interval:
    """--save-every, or Young's interval for the mean time between the faults. Raises RunFailed."""
    mtti_s = options.minutes * 60.0 / len(faults)
    if options.save_every:
        return Interval(options.save_every, mtti_s)
    log(f"measuring the cost of a dcp.async_save, over {runs.CALIBRATION_SAVES} saves")
    return best_interval(runs.measure_saves(job, parent=options.folder), mtti_s)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    shown = {name: value for name, value in vars(options).items() if name not in ("json", "folder", "save_every")}
    return {**shown, "world_size": WORLD_SIZE}


def print_table(figures: Mapping[Side, SideFigures], faults: Sequence[Fault], interval: Interval, repeats: int) -> None:
    console = Console(highlight=False, emoji=False)
    listed = ", ".join(f"{fault.kind} {fault.at_s:.0f} s" for fault in faults)
    console.print(
        f"flyball run, and torchrun with dcp.async_save: {repeats} repetitions of each, alternating. "
        f"Faults after the first step: {listed}."
    )
    console.print(f"Both save to the disk every {interval.every_steps} steps. {_interval_reason(interval)}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("")
    for side in figures:
        table.add_column(side.value, justify="right")
    table.add_row("goodput", *(_format_spread(side.goodput, percent) for side in figures.values()))
    table.add_row(
        "goodput at the reference step",
        *(_format_spread(side.goodput_at_reference_step, percent) for side in figures.values()),
    )
    table.add_row("ETTR", *(_format_spread(side.ettr, percent) for side in figures.values()))
    table.add_row("MTTR", *(_format_spread(side.mttr_s, seconds) for side in figures.values()))
    table.add_row(
        "lost steps, all faults", *(_format_spread(side.lost_steps, lambda n: f"{n:g}") for side in figures.values())
    )
    table.add_row("steps kept", *(_format_spread(side.steps_kept, lambda n: f"{n:g}") for side in figures.values()))
    table.add_row("median step", *(_format_spread(side.step_s, seconds) for side in figures.values()))
    table.add_row("faults met", *(", ".join(map(str, side.faults_met)) for side in figures.values()))
    _add_section(table, "where the time went", [side.seconds_by_category for side in figures.values()])
    _add_section(table, "lost to", [side.lost_s_by_fault for side in figures.values()])
    _add_section(table, "from a fault to the next step", [side.resumed_s_by_fault for side in figures.values()])
    console.print(table)
    for side, found in figures.items():
        for failure in found.failures:
            console.print(f"{side}: {failure.splitlines()[0]}", markup=False)  # stderr has the rest


def _interval_reason(interval: Interval) -> str:
    if interval.measured is None or interval.young_s is None:
        return "The interval was given."
    cost = interval.measured
    return (
        f"Young's interval for a save that costs {seconds(cost.cost_s)} and a fault every {seconds(interval.mtti_s)} "
        f"is {seconds(interval.young_s)}; a save takes {seconds(cost.duration_s)}, a step {seconds(cost.step_s)}."
    )


def _add_section(table: Table, name: str, columns: Sequence[Mapping[str, float]]) -> None:
    table.add_section()
    table.add_row(f"{name}:")
    keys = {key: max(column.get(key, 0.0) for column in columns) for column in columns for key in column}
    for key in sorted((key for key, most in keys.items() if most > 0), key=lambda key: -keys[key]):
        table.add_row(f"  {key.replace('_', ' ')}", *(seconds(column.get(key)) for column in columns))


def _format_spread(spread: Spread | None, text: Callable[[float], str]) -> str:
    if spread is None:
        return "-"
    if len(spread.runs) == 1:
        return text(spread.median)
    return f"{text(spread.median)} ({text(spread.min)} to {text(spread.max)})"


def log(what: str) -> None:
    print(f"goodput_under_faults: {what}", file=sys.stderr, flush=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in STOP_SIGNALS:  # a second signal would cut the clean-up short
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
