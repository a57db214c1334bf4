"""Lets a real job hang again and again, in six ways, and checks that Flyball names the rank that is to blame.

    python benchmarks/hangs.py                 30 hangs: each way five times, with another rank each time
    python benchmarks/hangs.py --rounds 1      each way once
    python benchmarks/hangs.py --json          one JSON object on stdout

One job of four ranks (gloo) runs under `flyball run --hang-timeout`. Each of its generations hangs in another way: a
deadlock, a data loader, an endless loop, a call on a file, a skipped collective, SIGSTOP. `seconds` are from the stall,
as it was noticed, to the decision that names the rank. Exit code 1 if a rank was not named.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent / "hanging_job" / "train.py"
WAYS = ("lock", "data_loader", "loop", "file", "skipped", "stopped")
RANKS = 4
SECONDS_PER_HANG = 60.0  # for a machine that is busy; three are usual
START_S = 120.0
HANG_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Hang:
    """One hang, and what the supervisor said about it."""

    way: str
    rank: int
    named: str = ""  # ranks
    stands: str = ""
    seconds: float | None = None
    reason: str = ""

    @property
    def is_named(self) -> bool:
        return self.named == str(self.rank)


def planned(rounds: int) -> list[Hang]:
    return [Hang(way, (number + place) % RANKS) for number in range(rounds) for place, way in enumerate(WAYS)]


def run(hangs: Sequence[Hang], folder: Path) -> list[Hang]:
    """Run the job to its end. Raises CalledProcessError or TimeoutExpired."""
    flyball = [str(Path(sys.executable).parent / "flyball"), "run", "--nproc-per-node", str(RANKS)]
    limits = ["--hang-timeout", str(HANG_TIMEOUT_S), "--max-restarts", str(2 * len(hangs))]
    state = folder / "s"
    with (folder / "output.log").open("wb") as output:
        subprocess.run(
            [*flyball, *limits, "--state-dir", str(state), "--job", "hangs", str(SCRIPT)],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HANGS": " ".join(f"{hang.way}:{hang.rank}" for hang in hangs),
                "HANGS_FOLDER": str(folder),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=START_S + SECONDS_PER_HANG * len(hangs),
            check=True,
        )
    incidents, decisions = record_of(state)
    came = [line.split() for line in (folder / "hung.txt").read_text().splitlines()]
    assert [way for _, way in came] == [hang.way for hang in hangs]
    return [_judged(hang, int(line[0]), incidents, decisions) for hang, line in zip(hangs, came, strict=True)]


def record_of(state: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The incidents and the decisions of the run's supervisor, oldest first."""
    with closing(sqlite3.connect(f"file:{state / 'supervisor' / 'flyball.sqlite'}?mode=ro", uri=True)) as connection:
        incidents, decisions = (
            [
                json.loads(document)
                for (document,) in connection.execute(f"SELECT document FROM {table} ORDER BY number")
            ]
            for table in ("incidents", "decisions")
        )
    return incidents, decisions


def _judged(
    hang: Hang, generation: int, incidents: Sequence[Mapping[str, Any]], decisions: Sequence[Mapping[str, Any]]
) -> Hang:
    """What the first decision that answers the hang of this generation says."""
    opened_at = {i["incident_id"]: i["opened_at"] for i in incidents if i["cause"] == "rank_stalled"}
    answers = [
        decision
        for decision in decisions
        if decision["incident_id"] in opened_at
        and decision["kind"] not in ("take_stacks", "hold")
        and decision["evidence"].get("generation") == generation
    ]
    if not answers:
        return hang
    evidence = answers[0]["evidence"]
    return Hang(
        way=hang.way,
        rank=hang.rank,
        named=str(evidence.get("culprits") or evidence.get("ranks") or ""),
        stands=str(evidence.get("stands", "")),
        seconds=round(answers[0]["at"] - opened_at[answers[0]["incident_id"]], 3),
        reason=answers[0]["reason"],
    )


def table(hangs: Sequence[Hang]) -> str:
    lines = [f"{'way':12} rank  named  seconds  where the ranks stand"]
    for hang in hangs:
        seconds = "-" if hang.seconds is None else f"{hang.seconds:.2f}"
        lines.append(f"{hang.way:12} {hang.rank:4}  {hang.named or '-':>5}  {seconds:>7}  {hang.stands or hang.reason}")
    right = [hang for hang in hangs if hang.is_named]
    slowest = max((hang.seconds for hang in right if hang.seconds is not None), default=0.0)
    return "\n".join([*lines, f"{len(right)} of {len(hangs)} named, the slowest after {slowest:.2f} s"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Hangs of a real job, and the ranks that are named for them.")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way comes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    load_average_1m = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fb-hangs-") as folder:
        try:
            hangs = run(planned(options.rounds), Path(folder))
        except subprocess.SubprocessError as error:
            print((Path(folder) / "output.log").read_text(errors="replace")[-4_000:], file=sys.stderr)
            raise SystemExit(f"hangs: {error}") from error
    if options.json:
        result = {
            "schema": "flyball.benchmark.hangs.v1",
            "cpus": len(os.sched_getaffinity(0)),
            "load_average_before_1m": round(load_average_1m, 2),
            "hangs": [asdict(hang) | {"is_named": hang.is_named} for hang in hangs],
            "ok": all(hang.is_named for hang in hangs),
        }
        print(json.dumps(result, indent=2))
    else:
        print(table(hangs))
    return 0 if all(hang.is_named for hang in hangs) else 1


if __name__ == "__main__":
    sys.exit(main())
