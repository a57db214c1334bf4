"""Run everything that continuous integration runs, in order, and tell what each target took; called by .ci/run.

    python3 deploy/ci.py                  all targets; they should take less than 45 minutes
    python3 deploy/ci.py --limit-s 0      all of them, however long it takes
    python3 deploy/ci.py lint docs test   some of them

A few failures run once more, by themselves. What passes then is flaky: it is written to tests/known_flaky.txt, to be
committed with its cause. There is no second run if tests could not be collected, or if many failed.

The run is red if a target failed, if one was left out because it would not have ended in time, or if
tests/known_flaky.txt has more than 10 lines or one older than 30 days. Exit codes: 0, 1 if the run is red.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
KNOWN_FLAKY: Final = ROOT / "tests" / "known_flaky.txt"
LAST_FAILED: Final = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
GOAL_S: Final = 45 * 60.0  # a run that takes longer says so
LIMIT_S: Final = 85 * 60.0  # of a machine that is far too slow, or busy: what would end later is left out
MOST_RUN_AGAIN: Final = 10
MOST_KNOWN, OLDEST_KNOWN_DAYS = 10, 30
RUN_AGAIN: Final = "AGAIN=-n 0 --last-failed --last-failed-no-failures none"
# How long each takes with its installation, on two cores that do nothing else.
USUAL_S: Final[Mapping[str, float]] = {
    "lint": 80,
    "docs": 35,
    "test": 270,
    "processes": 570,
    "first-hour": 213,
    "proofs": 870,
    "test-integrations": 190,
    "test-rdma": 330,
    "test-compose": 134,
}
MEASURE: Final = "test"  # how much longer it takes than usual is how much slower this machine is


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run of a target."""

    passed: bool
    failed: frozenset[str] = frozenset()  # tests
    is_whole: bool = True  # all tests were collected and begun


@dataclass(slots=True)
class Report:
    """Of all targets."""

    took_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, frozenset[str]] = field(default_factory=dict)  # by target
    flaky: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # target, why

    @property
    def is_red(self) -> bool:
        return bool(self.failed or self.left_out)


Run = Callable[[str, bool], Outcome]  # the target; whether only what failed runs, again


def run_all(targets: Iterable[str], run: Run, clock_s: Callable[[], float], limit_s: float) -> Report:
    """Run each target that is expected to end within `limit_s` of now; 0: each."""
    report, began_s, slowness = Report(), clock_s(), 1.0
    for target in targets:
        over_s = clock_s() - began_s
        expected_s = USUAL_S[target] * slowness
        if limit_s and over_s + expected_s > limit_s:
            report.left_out[target] = f"{over_s:.0f} s were over, and it takes about {expected_s:.0f} s here"
            continue
        outcome = run(target, False)
        if may_run_again(outcome):
            again = run(target, True)
            report.flaky += sorted(outcome.failed - again.failed)
            outcome = again
        report.took_s[target] = clock_s() - began_s - over_s
        if not outcome.passed:
            report.failed[target] = outcome.failed
        if target == MEASURE:
            slowness = max(1.0, report.took_s[target] / USUAL_S[target])
    return report


def may_run_again(outcome: Outcome) -> bool:
    return not outcome.passed and outcome.is_whole and 0 < len(outcome.failed) <= MOST_RUN_AGAIN


def too_flaky(lines: Iterable[str], today: date) -> list[str]:
    """What is wrong with tests/known_flaky.txt: lines of `date | test | cause`, and comments."""
    known = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    wrong = [f"It has {len(known)} lines, and at most {MOST_KNOWN} may be flaky."] if len(known) > MOST_KNOWN else []
    for line in known:
        found = re.fullmatch(r"(\d{4}-\d\d-\d\d) \| (\S.*::.*\S) \| (\S.*)", line)
        try:
            days = (today - date.fromisoformat(found[1])).days if found else 0
        except ValueError:
            found = None
        if found is None:
            wrong.append(f"Not `date | test | cause`: {line}")
        elif days > OLDEST_KNOWN_DAYS:
            wrong.append(f"{found[2]} has been flaky for {days} days. Mend it: {found[3]}")
    return wrong


def outcome_of(exit_code: int, output: Sequence[str], kept: Iterable[str] = ()) -> Outcome:
    """`output`: of make. `kept`: the tests that pytest keeps as failed; in a virtual machine it keeps none, and the
    whole target runs again. Only a whole run judges processor time, and words that a golden file holds and nobody says.
    """
    broken = re.compile(r"^ERROR \S+\.py( |$)|INTERNALERROR|Interrupted|no tests ran|run `make goldens`|^TOO DEAR")
    named = (re.search(r"^(?:vm\d+\| )?(?:FAILED|ERROR) (tests/\S+::.*?)(?: - |$)", line.rstrip()) for line in output)
    failed = frozenset(kept) or frozenset(found[1] for found in named if found)
    is_whole = not any(broken.search(line) for line in output)
    return Outcome(exit_code == 0, failed if exit_code else frozenset(), is_whole)


def make(target: str, again: bool) -> Outcome:
    print(f"\n=== make {target}{': what failed, by itself' if again else ''} ===", flush=True)
    if not again:
        LAST_FAILED.unlink(missing_ok=True)
    words = ["make", target, *([RUN_AGAIN] if again else [])]
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    code = process.wait()
    return outcome_of(code, lines, json.loads(LAST_FAILED.read_text()) if LAST_FAILED.exists() else ())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(USUAL_S)}; all if none is named")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="leave out what would end later; 0: nothing")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(USUAL_S):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(USUAL_S)}")
    report = run_all(options.targets or USUAL_S, make, time.monotonic, options.limit_s)
    today = datetime.now(UTC).date()
    if report.flaky:
        known = KNOWN_FLAKY.read_text().rstrip("\n").splitlines()
        lines = [*known, *(f"{today} | {name} | not known yet" for name in report.flaky)]
        KNOWN_FLAKY.write_text("\n".join(lines) + "\n")
    wrong = too_flaky(KNOWN_FLAKY.read_text().splitlines(), today)
    print("\n=== what it took ===")
    for target, took_s in report.took_s.items():
        print(f"{target:18} {took_s:5.0f} s  {'FAILED' if target in report.failed else 'passed'}")
    all_s = sum(report.took_s.values())
    late = f"  more than the {GOAL_S:.0f} s that it should take" if all_s > GOAL_S else ""
    print(f"{'all':18} {all_s:5.0f} s{late}")
    for target, names in report.failed.items():
        print(f"FAILED: make {target}", *sorted(names), sep="\n  ")
    for target, why in report.left_out.items():
        print(f"LEFT OUT: make {target}: {why}. Run it by hand.")
    for name in report.flaky:
        print(f"FLAKY: {name}\n  is in tests/known_flaky.txt now. Find the cause, and commit the line with it.")
    for line in wrong:
        print(f"tests/known_flaky.txt: {line}")
    return 1 if report.is_red or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
