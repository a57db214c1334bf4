"""`flyball demo`: two hosts and a spare on this machine, four faults, and proof that training was not affected."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

import flyball
from flyball.cli.demo.faults import (
    PROGRESS_DEADLINE_S,
    SPARE_DEADLINE_S,
    START_DEADLINE_S,
    STEPS_BETWEEN_FAULTS,
    FaultRow,
    inject_and_measure,
)
from flyball.cli.demo.reference import LossComparison, compare, newest_step, read_losses, run_reference
from flyball.cli.demo.stack import JOB, WORLD_SIZE, DemoStack
from flyball.cli.demo.timeline import DemoTimeline
from flyball.cli.reach.options import command_help
from flyball.cli.reach.places import make_state_dir
from flyball.cli.show.output import Format, OutputOption, print_fields, print_table, printed
from flyball.cli.signals import EndSignals
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import NotFound
from flyball.contracts.events import EventKind

if TYPE_CHECKING:
    from goodput.account.measures import Quantiles

FIRST_HOSTS = ("host-a", "host-b")
SPARES = ("host-c", "host-d")
STEPS_AFTER_LAST = 10
MAX_STEPS = 100_000  # never reached: the demo stops the job
REFERENCE_DEADLINE_S = 600.0

COMMAND = command_help(
    "Show four faults and their recoveries on this machine. Trains a small model on four ranks, injects the faults, "
    "and compares all losses with an uninterrupted run. Takes a few minutes.",
    "flyball demo",
    "flyball demo --json > result.json",
    "flyball demo --keep --port 7370",
)


def command(
    *,
    steps: Annotated[int, typer.Option(min=0, help="train at least this many steps")] = 0,
    keep: Annotated[
        bool, typer.Option("--keep", help="keep logs, losses, database and event log (always kept on failure)")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the dashboard; 0 picks a free one")] = 0,
    state_dir: Annotated[str, typer.Option(help="folder for the demo's files (default: a temporary one)")] = "",
    seed: Annotated[int, typer.Option(help="random seed of the training")] = 1234,
    output: OutputOption = Format.TABLE,
) -> int:
    """Exit code 0 only if every fault was recovered and every loss equals the uninterrupted run's."""
    script = _example()
    parent = Path(state_dir) if state_dir else Path(tempfile.gettempdir())
    folder = make_state_dir(parent / f"flyball-demo-{secrets.token_hex(3)}")
    done = False
    try:
        with (
            EndSignals(("SIGTERM", "SIGINT", "SIGHUP")) as signals,
            DemoTimeline(on_stderr=output.is_for_programs) as timeline,
        ):
            result = _Demo(folder, script, seed, timeline, signals).run(steps, port)
            done = result.passed
        if not printed(result.to_json(), output):
            print_result(result)
    finally:
        if done and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            typer.echo(f"logs, losses and event log are in {folder}", err=True)
    return 0 if done else 1


class _Demo:
    def __init__(self, folder: Path, script: Path, seed: int, timeline: DemoTimeline, signals: EndSignals) -> None:
        self._folder = folder
        self._script = script
        self._seed = seed
        self._timeline = timeline
        self._signals = signals
        self._stack = DemoStack(folder, timeline, signals)

    def run(self, steps: int, port: int) -> DemoResult:
        """Run the whole demo. Leaves no process and no shared memory behind, however it ends."""
        with ExitStack() as cleanup:
            cleanup.callback(self._stack.stop)
            self._start(port)
            rows = tuple(self._fault(fault) for fault in FAULTS)
            self._progress(max(self._newest() + STEPS_AFTER_LAST, steps - 1))
            self._stack.stop_job()
            report = self._goodput()
        decisions = sum(1 for _ in self._stack.feed.select(EventKind.DECISION))
        return self._compare(rows, report, decisions)

    def _start(self, port: int) -> None:
        stack = self._stack
        self._timeline.show_activity("starting the supervisor, two hosts and a spare")
        stack.start(port)
        self._timeline.print(f"dashboard: {stack.supervisor.url}/?token={stack.supervisor.token}")
        for host_id in (*FIRST_HOSTS, SPARES[0]):
            stack.add_host(host_id)
        wanted = {*FIRST_HOSTS, SPARES[0]}
        stack.wait(lambda: wanted <= stack.ready_hosts(), "the start of the host daemons", START_DEADLINE_S)
        stack.submit(self._script, self._arguments(stack.losses_dir, MAX_STEPS))
        stack.wait(lambda: self._newest() >= STEPS_BETWEEN_FAULTS, "the first steps of training", START_DEADLINE_S)

    def _fault(self, fault: str) -> FaultRow:
        """Wait for a spare and for a few more steps, inject the fault, and measure the recovery."""
        stack = self._stack
        if fault in ("host-down", "preempt"):
            self._timeline.show_activity("waiting for a spare host")
            stack.wait(self._has_spare, f"a spare host before the fault {fault}", SPARE_DEADLINE_S)
        self._progress(self._newest() + STEPS_BETWEEN_FAULTS)
        self._timeline.show_activity(f"fault {fault}: watching the recovery")
        row = inject_and_measure(stack, fault)
        if fault == "host-down":
            stack.add_host(SPARES[1])
        return row

    def _progress(self, step: int) -> None:
        self._timeline.show_activity("training")
        self._stack.wait(lambda: self._newest() >= step, f"step {step} of training", PROGRESS_DEADLINE_S)

    def _newest(self) -> int:
        return self._stack.feed.newest_world_step(WORLD_SIZE)

    def _has_spare(self) -> bool:
        busy = {rank["host_id"] for rank in self._stack.job()["ranks"]}
        return bool(self._stack.ready_hosts() - busy)

    def _goodput(self) -> Any:  # noqa: ANN401 - goodput.calculator.GoodputReport, imported late
        from goodput.calculator import calculate
        from goodput.read.event_files import write_events

        write_events(self._folder / "events.jsonl", self._stack.feed.events)
        return calculate(self._stack.feed.events, now=SystemClock().wall_s(), job=JOB)

    def _compare(self, rows: tuple[FaultRow, ...], report: Any, decisions: int) -> DemoResult:  # noqa: ANN401
        losses = read_losses(self._stack.losses_dir)
        count = newest_step(losses) + 1
        self._timeline.print(f"running the same {count} steps without faults, under plain torchrun")
        folder = self._folder / "reference-losses"
        run_reference(
            self._script,
            self._arguments(folder, count),
            world_size=WORLD_SIZE,
            log_file=self._folder / "reference.log",
            deadline_s=REFERENCE_DEADLINE_S,
            on_wait=self._check_reference(folder, count),
        )
        return DemoResult(
            steps=count,
            faults=rows,
            comparison=compare(losses, read_losses(folder)),
            goodput=report.goodput,
            badput_s=dict(report.badput_s),
            repair=dict(report.repair),
            decisions=decisions,
        )

    def _check_reference(self, folder: Path, count: int) -> Callable[[], None]:
        def check() -> None:
            self._signals.check()
            self._timeline.show_activity(f"uninterrupted run: {newest_step(read_losses(folder)) + 1} of {count} steps")

        return check

    def _arguments(self, losses_dir: Path, steps: int) -> tuple[str, ...]:
        return ("--steps", str(steps), "--seed", str(self._seed), "--losses-dir", str(losses_dir))


def _example() -> Path:
    """The training script, which is beside the package in a checkout, and inside it in a wheel."""
    package = Path(flyball.__file__).parent
    for folder in (package.parent / "examples", package / "examples"):
        if (folder / "train_gpt.py").is_file():
            return folder / "train_gpt.py"
    raise NotFound(
        f"The example train_gpt.py is not installed with {package}.",
        hint="install Flyball from its repository or wheel",
    )


# --- the report ------------------------------------------------------------------------------------------------------

FAULTS = ("kill", "hang", "host-down", "preempt")


@dataclass(frozen=True)
class DemoResult:
    """The demo's results."""

    steps: int
    faults: tuple[FaultRow, ...]
    comparison: LossComparison
    goodput: float | None
    badput_s: dict[str, float]
    repair: dict[str, Quantiles]  # durations of the parts of the repairs
    decisions: int

    @property
    def passed(self) -> bool:
        """Whether every fault was recovered, and training was identical to a run without faults, bit for bit."""
        return (
            tuple(f.fault for f in self.faults) == FAULTS
            and all(f.recovered for f in self.faults)
            and self.comparison.matches
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "faults": [f.to_json() for f in self.faults],
            "loss_matches_uninterrupted": self.comparison.matches,
            "losses_compared": self.comparison.compared,
            "losses_of_repeated_steps": self.comparison.recomputed,
            "loss_problems": list(self.comparison.problems),
            "goodput": self.goodput,
            "badput_s": {cause: round(seconds, 3) for cause, seconds in self.badput_s.items()},
            "repair": {part: msgspec.to_builtins(found) for part, found in self.repair.items()},
            "decisions": self.decisions,
        }


def print_result(result: DemoResult) -> None:
    """Print the report on stdout."""
    print_table(
        "Faults (seconds since the injection; steps lost)",
        ("fault", "decision", "detected", "decided", "resumed", "lost", "from"),
        (
            [
                f.fault,
                f.decision.replace("_", " "),
                *(f"{seconds:.2f}" for seconds in (f.detected_s, f.decided_s, f.resumed_s)),
                f.lost_steps,
                f.restored_from,
            ]
            for f in result.faults
        ),
    )
    lost_steps = sum(f.lost_steps for f in result.faults)
    losses = result.comparison
    counts = f"{losses.compared} compared with an uninterrupted run, {losses.recomputed} of them of recomputed steps"
    same = "all equal, bit for bit" if losses.matches else "NOT equal: " + "; ".join(losses.problems)
    print_fields(
        {
            "steps": result.steps,
            "losses": f"{counts}: {same}",
            "goodput": "-" if result.goodput is None else f"{100 * result.goodput:.1f} % of the elapsed time",
            "badput": ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in result.badput_s.items()) or "none",
            "decisions": result.decisions,
            "verdict": f"every fault recovered, {lost_steps} steps lost and recomputed" if result.passed else "FAILED",
        }
    )
