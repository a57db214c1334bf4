"""Lets a real job hang again and again, in twenty ways, and times when Flyball says so, says why, and acts.

    python benchmarks/hangs.py                 each way five times, with another rank each time
    python benchmarks/hangs.py --rounds 1      each way once
    python benchmarks/hangs.py --ways lock,loop
    python benchmarks/hangs.py --json          one JSON object on stdout

Two jobs a round, of four ranks (gloo), run under `flyball run`, each of whose generations hangs in another way; a job
that hangs twice at one place is given ten times as long there. The first has the
default deadlines: nothing can end these hangs, or nothing outside of the job. The second has --hang-timeout: by default
its hangs, which look like an ordinary pause or like work, are acted on after 5 or 30 minutes. All seconds are from the
hang: until the job is said to stand, until the rank to blame is named beside that, until the decision that restarts it.
Exit code 1 if a rank was not named.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.places import live_record
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError

SCRIPT = Path(__file__).resolve().parent / "hanging_job" / "train.py"
BY_DEFAULT = ("lock", "event", "queue", "two_locks", "join", "stopped", "process_event", "skipped", "subgroup")
WITH_A_LIMIT = (
    "fork",
    "child",
    "file",
    "pipe",
    "socket",
    "sleep",
    "c_sleep",
    "loop",
    "c_loop",
    "loader",
    "loader_stopped",
)
RANKS = 4
SECONDS_PER_HANG = 120.0  # for a machine that is busy
START_S = 120.0
HANG_TIMEOUT_S = 10.0
LOOK_S = 0.2
JOB = "hangs"


@dataclass(frozen=True)
class Hang:
    """One hang, and what the supervisor said about it."""

    way: str
    rank: int
    named: str = ""  # ranks
    stands: str = ""
    told_s: float | None = None
    explained_s: float | None = None
    acted_s: float | None = None
    stance: str = ""
    reason: str = ""

    @property
    def is_named(self) -> bool:
        return self.named == str(self.rank)


def planned(ways: Sequence[str], number: int) -> list[Hang]:
    """The hangs of one round."""
    return [Hang(way, (number + place) % RANKS) for place, way in enumerate(ways)]


def run(hangs: Sequence[Hang], folder: Path, *options: str) -> list[Hang]:
    """Run the job to its end. Raises CalledProcessError or TimeoutExpired."""
    folder.mkdir()
    flyball = [str(Path(sys.executable).parent / "flyball"), "run", "--nproc-per-node", str(RANKS)]
    limits = [*options, "--max-restarts", str(2 * len(hangs))]
    state = folder / "s"
    with (folder / "output.log").open("wb") as output, looking(state) as looks:
        subprocess.run(
            [*flyball, *limits, "--state-dir", str(state), "--job", JOB, str(SCRIPT)],
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
    assert [way for _, way, _ in came] == [hang.way for hang in hangs]
    ends = [*(float(at) for _, _, at in came[1:]), float("inf")]
    return [
        _told(_judged(hang, int(generation), float(at), incidents, decisions), float(at), end, looks)
        for hang, (generation, _, at), end in zip(hangs, came, ends, strict=True)
    ]


@contextmanager
def looking(state: Path) -> Iterator[list[tuple[float, str, str]]]:
    """Ask again and again how the job stands. Yields (when, the word, the sentence)."""
    over, clock = threading.Event(), SystemClock()
    looks: list[tuple[float, str, str]] = []

    def look() -> None:
        client: ApiClient | None = None
        while not over.wait(LOOK_S):
            try:
                if client is None and (record := live_record(state / "supervisor")) is not None:
                    client = ApiClient(record.url, (state / "supervisor" / "token").read_text().strip())
                if client is not None:
                    doing = client.get(f"/v1/jobs/{JOB}")["doing"]
                    looks.append((clock.wall_s(), doing["kind"], doing["text"]))
            except (FlyballError, OSError):
                continue
        if client is not None:
            client.close()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()


def _told(hang: Hang, at: float, end: float, looks: Sequence[tuple[float, str, str]]) -> Hang:
    """The hang with when it was told, and when it was explained."""
    mine = [(when - at, kind, text) for when, kind, text in looks if at < when < end]
    told = [when for when, kind, _ in mine if kind in ("standing", "recovering")]
    named = f"Rank {hang.rank} "
    explained = [when for when, kind, text in mine if kind in ("standing", "recovering") and named in text]
    first = [round(found[0], 2) if found else None for found in (told, explained)]
    return replace(hang, told_s=first[0], explained_s=first[1])


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
    hang: Hang,
    generation: int,
    at: float,
    incidents: Sequence[Mapping[str, Any]],
    decisions: Sequence[Mapping[str, Any]],
) -> Hang:
    """What the first decision that answers the hang of this generation says."""
    stalls = {i["incident_id"] for i in incidents if i["cause"] == "rank_stalled"}
    answers = [
        decision
        for decision in decisions
        if decision["incident_id"] in stalls
        and decision["kind"] not in ("take_stacks", "hold")
        and decision["evidence"].get("generation") == generation
    ]
    if not answers:
        return hang
    evidence = answers[0]["evidence"]
    seen = [decision["evidence"] for decision in decisions if decision["incident_id"] == answers[0]["incident_id"]]
    return replace(
        hang,
        named=str(evidence.get("culprits") or evidence.get("ranks") or ""),
        stands=str(evidence.get("stands", "")),
        acted_s=round(answers[0]["at"] - at, 2),
        stance=next((str(one["stance"]) for one in seen if one.get("stance")), ""),
        reason=answers[0]["reason"],
    )


def table(hangs: Sequence[Hang]) -> str:
    lines = [f"{'way':15} rank  named   told  explained  acted  stance     where the ranks stand"]
    for hang in hangs:
        told, explained, acted = (
            "-" if at is None else f"{at:.1f}" for at in (hang.told_s, hang.explained_s, hang.acted_s)
        )
        lines.append(
            f"{hang.way:15} {hang.rank:4}  {hang.named or '-':>5}  {told:>5}  {explained:>9}  {acted:>5}  "
            f"{hang.stance:9}  {hang.stands or hang.reason}"
        )
    return "\n".join([*lines, summary(hangs)])


def summary(hangs: Sequence[Hang]) -> str:
    return f"{sum(hang.is_named for hang in hangs)} of {len(hangs)} named"


def main() -> int:
    parser = argparse.ArgumentParser(description="Hangs of a real job, and the ranks that are named for them.")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way comes")
    parser.add_argument(
        "--ways", default=",".join(BY_DEFAULT + WITH_A_LIMIT), help="which, by their names, separated by commas"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if unknown := {*options.ways.split(",")} - {*BY_DEFAULT, *WITH_A_LIMIT}:
        parser.error(
            f"--ways: {', '.join(sorted(unknown))}: not known; there are {', '.join(BY_DEFAULT + WITH_A_LIMIT)}"
        )
    load_average_1m = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fb-hangs-") as folder:
        try:
            hangs = []
            jobs = ((BY_DEFAULT, ()), (WITH_A_LIMIT, ("--hang-timeout", str(HANG_TIMEOUT_S))))
            for number, (ways, given) in itertools.product(range(options.rounds), jobs):
                if chosen := [way for way in ways if way in options.ways.split(",")]:
                    hangs += run(planned(chosen, number), Path(folder) / f"{chosen[0]}{number}", *given)
                    print(f"round {number + 1} of {options.rounds}: {summary(hangs)}", file=sys.stderr, flush=True)
        except subprocess.SubprocessError as error:
            for output in Path(folder).glob("*/output.log"):
                print(output.read_text(errors="replace")[-4_000:], file=sys.stderr)
            raise SystemExit(f"hangs: {error}") from error
    if options.json:
        result = {
            "schema": "flyball.benchmark.hangs.v2",
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
