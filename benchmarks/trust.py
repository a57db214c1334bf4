"""Shows what Flyball stands: random faults against a live stack, noise without faults, and other launchers beside it.

    python benchmarks/trust.py chaos --faults 300 --duration 3h    faults against three hosts and a spare
    python benchmarks/trust.py quiet --duration 10m                the same stack under noise, without a fault
    python benchmarks/trust.py shootout --repeats 3                other launchers, the same loop and faults
    python benchmarks/trust.py chaos --seed 7 --json               one JSON object on stdout, progress on stderr

`chaos` draws faults from the seed: of workers, hosts, the network, checkpoints, services, Redis and MariaDB, two at
once among them. Afterwards it compares every loss of every rank with an uninterrupted run of torchrun, and looks into
the database and the hosts' logs for what was done twice. With --record FILE each fault is appended to FILE as it is
judged, one JSON object a line: what was found out is there even if the benchmark is killed. docs/explanation/trust.md
has the figures.

`shootout` runs one training loop under Flyball, torchrun, NVRx's ft_launcher, torchft, DLRover and LM Resiliency, in
turns: two hosts, a kill, an exception, a hang, a lost host, a notice. The last four have environments of their own,
over this one (the docs say how): `--python nvrx=FOLDER/bin/python`. Flyball and torchrun are in this one.

Servers and services are its own. It needs mariadbd, redis-server, and for faults of the network CAP_SYS_ADMIN.

Exit codes: 0; 1 if anything was lost, missed or done twice; 7 for too little memory; 130 if interrupted. No process,
segment or namespace is left behind.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402 - the line above makes the rest importable
import psutil  # noqa: E402
import structlog  # noqa: E402
from restart import machine  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from trust_bench.chaos import ChaosResult, run_chaos  # noqa: E402
from trust_bench.interruption import Interruption  # noqa: E402
from trust_bench.peers import PEERS, python_of  # noqa: E402
from trust_bench.quiet import run_quiet  # noqa: E402
from trust_bench.race import FAULTS, RaceFailed, RaceRun, race  # noqa: E402
from trust_bench.stack import NEEDED_BYTES, StackError  # noqa: E402

from flyball.cli.show.given_times import parse_duration  # noqa: E402
from flyball.contracts.errors import FlyballError  # noqa: E402
from simulator.inject.campaign.outcome import FaultOutcome, FaultVerdict  # noqa: E402
from simulator.planning.paired import estimate  # noqa: E402

SCHEMA = "flyball.benchmark.trust.v1"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    chaos = parts.add_parser("chaos", help="random faults")
    chaos.add_argument("--faults", type=_count, default=300, help="how many (300)")
    chaos.add_argument("--seed", type=int, default=1, help="draws the same faults again (1)")
    chaos.add_argument("--record", type=_record, help="append each fault to this file as it is judged")
    quiet = parts.add_parser("quiet", help="noise without faults")
    for part, default in ((chaos, "3h"), (quiet, "10m")):
        part.add_argument("--duration", default=default, help=f"ends it even if faults are left ({default})")
        part.add_argument("--json", action="store_true", help="print one JSON object")
    shootout = parts.add_parser("shootout", help="other launchers beside it")
    shootout.add_argument("--repeats", type=_count, default=3, help="runs of each, in turns (3)")
    shootout.add_argument("--peers", nargs="+", choices=list(PEERS), default=["flyball", "torchrun"])
    shootout.add_argument(
        "--python",
        action="append",
        type=_peer_python,
        default=[],
        metavar="PEER=FILE",
        help="the interpreter of a peer's environment",
    )
    shootout.add_argument("--hang-timeout-s", type=_count, default=10, help="without a step, for all (10)")
    shootout.add_argument(
        "--save-every", type=_count, default=12, help="steps between two saves to the disk, for all (12)"
    )
    shootout.add_argument("--record", type=_record, help="append each run to this file")
    shootout.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.part == "shootout":
        return options
    try:
        options.duration_s = parse_duration("--duration", options.duration)
    except FlyballError as error:
        parser.error(error.message)
    if options.duration_s <= 0.0:
        parser.error(f"argument --duration: it must be above 0, and is {options.duration}")
    return options


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is needed, and this is {text!r}")
    return value


def _record(text: str) -> Path:
    path = Path(text)
    try:
        path.open("ab").close()  # now, rather than after the first result
    except OSError as error:
        raise argparse.ArgumentTypeError(f"nothing can be appended to {text}: {error.strerror}") from error
    return path


def _peer_python(text: str) -> tuple[str, str]:
    name, equals, python = text.partition("=")
    if not equals or name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not PEER=FILE, with one of {', '.join(PEERS)} as the peer")
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise argparse.ArgumentTypeError(f"there is no interpreter {python}")
    return name, python


def main() -> int:
    options = parse()
    available = psutil.virtual_memory().available
    if available < NEEDED_BYTES:
        log(f"{available >> 20} MiB of memory are free; the benchmark needs {NEEDED_BYTES >> 20} MiB.")
        return 7
    interruption = Interruption(log)
    interruption.listen()
    # What is read while it changes would be warned of, on stdout.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    before = machine()
    try:
        code = {"chaos": chaos, "quiet": quiet, "shootout": shootout}[options.part](options, interruption, before)
    except (StackError, FlyballError) as error:
        log(str(error))
        code = 1
    except KeyboardInterrupt:
        log("interrupted")
    return 130 if interruption.is_asked else code


def chaos(options: argparse.Namespace, interruption: Interruption, before: dict[str, Any]) -> int:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=options.faults)

        def judged(outcome: FaultOutcome) -> None:
            progress.advance(task)
            if options.record is not None:
                with options.record.open("ab") as record:
                    record.write(msgspec.json.encode(outcome) + b"\n")

        def announce(line: str) -> None:
            progress.update(task, description=line[:100])
            log(line)

        result = run_chaos(
            faults=options.faults,
            duration_s=options.duration_s,
            seed=options.seed,
            announce=announce,
            judged=judged,
            interruption=interruption,
        )
    table = summary(result)
    if options.json:
        settings = {"faults": options.faults, "duration_s": options.duration_s, "seed": options.seed}
        shown = {"schema": SCHEMA, "part": "chaos", "machine": before, "settings": settings, "summary": table}
        print(json.dumps({**shown, **msgspec.to_builtins(result)}, indent=2))
    else:
        for name, value in table.items():
            print(f"{name:<48} {value}")
        for fault in result.faults:
            if fault.verdict.is_failure:
                print(f"{fault.number}. {fault.fault}, {fault.target}: {fault.verdict}. {fault.why}")
        print("\n".join((*result.incidents_without_fault, *result.audit.findings)))
        if result.ended_early:
            print(f"It ended early: {result.ended_early}.")
    return 0 if is_clean(result) else 1


def summary(result: ChaosResult) -> dict[str, int | float | str]:
    """The table that docs/explanation/trust.md shows."""
    verdicts = Counter(fault.verdict for fault in result.faults)
    injected = len(result.faults) - verdicts[FaultVerdict.NOT_INJECTED]
    found = result.audit
    return {
        "faults injected": injected,
        "not injected": verdicts[FaultVerdict.NOT_INJECTED],
        "struck while another had no verdict": result.struck_together,
        "recovered": verdicts[FaultVerdict.RECOVERED],
        "trained on": verdicts[FaultVerdict.TRAINED_ON],
        "missed": verdicts[FaultVerdict.MISSED],
        "handled wrong": verdicts[FaultVerdict.WRONG],
        "incidents": result.incidents,
        "incidents without a fault": len(result.incidents_without_fault),
        "generations": found.generations,
        "steps": found.steps,
        "losses compared": found.executions,
        "losses that differ": found.losses_unequal,
        "steps missing": found.steps_missing,
        "wrong restores": found.wrong_restores,
        "committed steps lost": found.committed_steps_lost,
        "actions doubled": found.actions_doubled,
        "minutes": round(result.duration_s / 60.0, 1),
        "load average, least and most": f"{min(result.loads, default=0)} to {max(result.loads, default=0)}",
    }


def is_clean(result: ChaosResult) -> bool:
    found = result.audit
    counts = (found.losses_unequal, found.steps_missing, found.wrong_restores, found.committed_steps_lost)
    return not (any(counts) or found.actions_doubled or any(f.verdict.is_failure for f in result.faults))


def quiet(options: argparse.Namespace, interruption: Interruption, before: dict[str, Any]) -> int:
    found = run_quiet(duration_s=options.duration_s, announce=log, interruption=interruption)
    if options.json:
        shown = {"schema": SCHEMA, "part": "quiet", "machine": before, "load_average_after_1m": os.getloadavg()[0]}
        print(json.dumps({**shown, **msgspec.to_builtins(found)}, indent=2))
    else:
        print("\n".join((*found.incidents, *found.decisions)) or f"nothing was decided in {found.seconds:.0f} s")
    return 1 if found.incidents or found.decisions else 0


def shootout(options: argparse.Namespace, interruption: Interruption, before: dict[str, Any]) -> int:
    pythons = {name: python_of(PEERS[name], dict(options.python)) for name in options.peers}
    runs: list[RaceRun] = []
    failed: list[str] = []
    turns = [  # no peer is always first
        (repetition, options.peers[(repetition + place) % len(options.peers)])
        for repetition in range(1, options.repeats + 1)
        for place in range(len(options.peers))
    ]
    for repetition, name in turns:
        try:
            runs.append(
                race(
                    PEERS[name],
                    pythons[name],
                    repetition=repetition,
                    hang_timeout_s=options.hang_timeout_s,
                    save_every=options.save_every,
                    say=log,
                    interruption=interruption,
                )
            )
        except RaceFailed as error:
            failed.append(f"{name}, repetition {repetition}: {error}")
            log(failed[-1])
            continue
        except KeyboardInterrupt:  # what is complete is shown
            break
        if options.record is not None:
            with options.record.open("ab") as record:
                record.write(msgspec.json.encode(runs[-1]) + b"\n")
        if interruption.is_asked:  # while that run was cleaned up
            break
    found = {name: figures([run for run in runs if run.peer == name], runs) for name in options.peers}
    if options.json:
        shown = {"schema": SCHEMA, "part": "shootout", "machine": before, "figures": found, "failed": failed}
        print(json.dumps({**shown, "runs": [msgspec.to_builtins(run) for run in runs]}, indent=2))
    else:
        for name, table in found.items():
            print(name)
            for figure, value in table.items():
                print(f"  {figure:<32} {value}")
    return 1 if failed or not runs else 0


def figures(runs: list[RaceRun], everybody: list[RaceRun]) -> dict[str, str]:
    """Means with 95 % confidence intervals. Goodput: steps kept, at the shortest median step of all, over the time."""
    if not runs:
        return {"measured": "no"}
    step_s = min((run.step_s for run in everybody if run.step_s), default=0.0)
    found = {"runs": str(len(runs)), "start to first step": _spread([run.start_s for run in runs], "s")}
    for fault in FAULTS:
        recoveries = [r for run in runs for r in run.recoveries if r.fault == fault]
        seconds = [r.next_step_s for r in recoveries if r.next_step_s is not None]
        reasons = "; ".join(sorted({r.why for r in recoveries if r.next_step_s is None}))[:200]
        if seconds:
            lost = _spread([float(r.lost_steps or 0) for r in recoveries if r.next_step_s is not None], "steps lost")
            found[fault] = f"{_spread(seconds, 's')}, {lost}, {len(seconds)} of {len(runs)}"
            found[fault] += f": {reasons}" if reasons else ""
        else:
            found[fault] = f"-: {reasons or 'not reached'}"
        if alone := [r.alone_s for r in recoveries if r.alone_s is not None]:
            found[f"{fault}, the other alone"] = f"{_spread(alone, 's')}, {len(alone)} of {len(runs)}"
    if any(run.elapsed_s for run in runs):
        found["goodput"] = _spread(
            [100.0 * run.steps_kept * step_s / run.elapsed_s for run in runs if run.elapsed_s], "%"
        )
    found["median step"] = _spread([1000.0 * run.step_s for run in runs], "ms")
    found["load average before"] = ", ".join(str(run.load_average_1m) for run in runs)
    return found


def _spread(values: list[float], unit: str) -> str:
    found = estimate(values)
    return (
        f"{found.mean:.2f} {unit}" if found.low is None else f"{found.mean:.2f} ± {found.mean - found.low:.2f} {unit}"
    )


def log(what: str) -> None:
    print(f"trust: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
