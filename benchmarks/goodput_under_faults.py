"""How much of the time becomes training while workers fail: `flyball run` against torchrun with `dcp.async_save`.

    python benchmarks/goodput_under_faults.py                  a table
    python benchmarks/goodput_under_faults.py --json           one JSON object on stdout, progress on stderr
    python benchmarks/goodput_under_faults.py --minutes 5 --repeats 3 --seed 7

One job (a small GPT, two ranks, gloo, CPU; forward, backward, AdamW) and one list of faults drawn from the seed. Both
sides train it in turns, meet the same faults at the same offsets after their first step, and save to the same disk at
the same interval: Young's, from the fault rate of the list and from what a `dcp.async_save` is measured to cost, unless
--save-every gives it. The goodput calculator judges both event logs. docs/goodput-benchmark.md says what is compared.

It takes about repeats x 2 x (minutes + 0.5) + 1 minutes. Run it on a machine that does nothing else.

Exit codes: 0; 1 if a side could not be measured, or was over before its time; 2 for wrong arguments; 7 for too little
memory; 130 if it was interrupted. No process is left behind in any case.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402 - the line above makes the rest importable
import psutil  # noqa: E402
from goodput_bench import runs  # noqa: E402
from goodput_bench.fault_list import DEFAULT_KINDS, Fault, FaultKind, draw  # noqa: E402
from goodput_bench.figures import RunFigures, of_run, of_side, reference_step_s  # noqa: E402
from goodput_bench.live_job import STOP_SIGNALS  # noqa: E402
from goodput_bench.save_costs import Interval, best_interval  # noqa: E402
from goodput_bench.sides import WORLD_SIZE, Job, Side  # noqa: E402
from goodput_bench.table import show  # noqa: E402
from restart import NEEDED_BYTES, machine  # noqa: E402

from flyball.contracts.errors import FlyballError, UsageError  # noqa: E402

SCHEMA = "flyball.benchmark.goodput_under_faults.v1"
TORCHRUN_KILL_AFTER_S = 30.0  # SIGTERM to SIGKILL when torchrun restarts; it has no option for that


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training from the first step on (3)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side, in turns (2)")
    parser.add_argument("--seed", type=int, default=1, help="of the list of faults (1)")
    parser.add_argument(
        "--faults",
        nargs="+",
        type=FaultKind,
        choices=list(FaultKind),
        default=list(DEFAULT_KINDS),
        metavar="KIND",
        help=f"which occur: {', '.join(FaultKind)} (all but freeze)",
    )
    parser.add_argument(
        "--gap-s", nargs=2, type=float, default=(20.0, 30.0), metavar=("MIN", "MAX"), help="between faults (20 30)"
    )
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="in place of Young's interval")
    parser.add_argument(
        "--hang-timeout-s", type=float, default=10.0, help="of the training's process group, on both sides (10)"
    )
    parser.add_argument("--step-floor-s", type=float, default=0.1, help="a step takes at least this long (0.1)")
    parser.add_argument("--width", type=int, default=128, help="of the model (128)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (6)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for checkpoints and logs")
    options = parser.parse_args()
    if options.minutes <= 0 or options.repeats < 1 or (options.save_every or 1) < 1 or options.hang_timeout_s <= 0:
        parser.error("--minutes, --repeats, --save-every and --hang-timeout-s must be above 0")
    if not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is no folder")
    return options


def main() -> int:
    options = parse()
    available = psutil.virtual_memory().available
    if available < NEEDED_BYTES:
        say(f"{available >> 20} MiB of memory are free, {NEEDED_BYTES >> 20} are needed.")
        return 7
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        return compare(options)
    except KeyboardInterrupt:
        say("interrupted; every process that was started has ended")
        return 130
    except FlyballError as error:
        say(f"{error.message}\n{error.hint}")
        return 2 if isinstance(error, UsageError) else 1


def compare(options: argparse.Namespace) -> int:
    before = machine()
    faults = list_of_faults(options)
    job = Job(
        every_steps=options.save_every or runs.CALIBRATION_EVERY_STEPS,
        hang_timeout_s=options.hang_timeout_s,
        step_floor_s=options.step_floor_s,
        width=options.width,
        layers=options.layers,
    )
    interval = choose_interval(options, job, faults)
    job = msgspec.structs.replace(job, every_steps=interval.every_steps)
    say(f"{len(faults)} faults; both save every {interval.every_steps} steps")
    measured: dict[Side, list[RunFigures]] = {side: [] for side in Side}
    unmeasured: list[str] = []
    for repetition in range(1, options.repeats + 1):
        for side in Side if repetition % 2 else reversed(Side):
            try:
                observed = runs.run(side, job, faults, length_s=options.minutes * 60.0, parent=options.folder)
            except runs.RunFailed as error:
                unmeasured.append(f"{side}, repetition {repetition}: {error.message}")
                say(unmeasured[-1])
                continue
            found = of_run(observed, repetition)
            measured[side].append(found)
            say(
                f"{repetition}/{options.repeats} {side}: goodput {found.goodput:.3f}, {found.faults_met} of "
                f"{len(faults)} faults met, load {found.load_average}"
            )
            failed = f"{found.saves_failed} saves failed" if found.saves_failed else ""
            for line in (*found.faults_missed, failed, found.failure):
                if line:
                    say(f"{side}: {line}")
    told = [run for side in Side for run in measured[side]]
    figures = {side: of_side(told, side) for side in Side if measured[side]}
    if options.json:
        result = {
            "schema": SCHEMA,
            "machine": before,
            "settings": settings(options),
            "faults": faults,
            "interval": interval,
            **{side.value: figures.get(side) for side in Side},
            "reference_step_s": reference_step_s(told) if told else None,
            "runs": told,
            "unmeasured": unmeasured,
        }
        print(json.dumps(result, default=msgspec.to_builtins))
    else:
        show(figures, faults, interval, options.repeats)
    return 1 if unmeasured or any(found.failures for found in figures.values()) else 0


def list_of_faults(options: argparse.Namespace) -> tuple[Fault, ...]:
    """Raises UsageError if none fits."""
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
    """As given, else Young's for the mean time between the faults of the list. Raises RunFailed."""
    mtti_s = options.minutes * 60.0 / len(faults)
    if options.save_every:
        return Interval(options.save_every, mtti_s)
    say(f"measuring what a dcp.async_save costs, over {runs.CALIBRATION_SAVES} saves")
    return best_interval(runs.measure_saves(job, parent=options.folder), mtti_s)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    shown = {name: value for name, value in vars(options).items() if name not in ("json", "folder", "save_every")}
    return {**shown, "world_size": WORLD_SIZE}


def say(what: str) -> None:
    print(f"goodput_under_faults: {what}", file=sys.stderr, flush=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in STOP_SIGNALS:  # a second one would cut the clean-up short
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
