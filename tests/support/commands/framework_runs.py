"""Runs an example of a framework: by itself, and under `flyball run` with a worker killed by `flyball inject kill`.

Everything is a process of its own: the frameworks, torch and the supervisor as users have them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.commands.flyball import FlyballProcess
from support.commands.here import run_here
from support.commands.run_folders import environment_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Ended:
    """A run that has succeeded: the job as `flyball run -o json` tells it, and the output of its ranks."""

    job: dict[str, Any]
    output: str


def losses(output: str) -> list[str]:
    """The last loss of each rank, which the examples print as a hexadecimal number: nothing is rounded."""
    return sorted(re.findall(r"rank \d+: -?0x[0-9a-f.]+p[+-]\d+", output))


class Place:
    """A folder with the state of all runs, and their outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = environment_of(
            folder, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
        )

    def uninterrupted(self, script: Path, *arguments: str, ranks: int = 1) -> str:
        """As somebody runs it who has no Flyball. Returns its output."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        done = subprocess.run(
            [sys.executable, *torchrun, str(script), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=self.folder,
            env=self.environment,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def killed(
        self,
        script: Path,
        *arguments: str,
        kills: dict[int, int],
        lost: int = 1,
        flags: tuple[str, ...] = (),
        ranks: int = 1,
    ) -> Ended:
        """Under `flyball run`. `kills` has the rank to kill at each step, ascending. Each time training must go on from
        a step that is not older than that one by more than `lost` steps."""
        events = self.folder / f"{script.stem}.events"
        job = script.stem.replace("_", "-")
        words = ("--job", job, "--injectable", "-o", "json", "--nproc-per-node", str(ranks))
        environ = self.environment | {"FLYBALL_EVENTS": str(events)}
        with FlyballProcess(self.folder, "run", *words, *flags, str(script), *arguments, **environ) as run:
            for number, (step, rank) in enumerate(kills.items(), 1):
                run.wait_for(lambda step=step: self._step_of(job) >= step, f"step {step}")
                run.wait_for(lambda number=number: number in first_steps(events), f"a step of generation {number}")
                killed = run_here("inject", "kill", "--job", job, "--rank", str(rank), environment=self.environment)
                assert killed.returncode == 0, killed.stderr
            assert run.end() == 0, run.err
        ended = Ended(json.loads(run.out), run.err)
        assert ended.job["restart_count"] == len(kills), ended.output
        begun = first_steps(events)
        assert begun[1] == 0
        assert all(begun[number + 2] >= step - lost for number, step in enumerate(kills)), begun
        return ended

    def _step_of(self, job: str) -> int:
        """The newest step of all ranks; -1 before there is one."""
        shown = run_here("status", "--job", job, "-o", "json", environment=self.environment)
        if shown.returncode != 0:
            return -1
        [found] = json.loads(shown.stdout)["jobs"]
        return -1 if found.get("newest_step") is None else int(found["newest_step"])


def first_steps(events: Path) -> dict[int, int]:
    """The first step of each generation, as the ranks told it. Ranks append at the same time, so lines may be blank."""
    found: dict[int, int] = {}
    for event in map(json.loads, filter(None, events.read_text().splitlines())):
        if event["kind"] == "steps":
            generation, step = event["generation"], event["data"]["first_step"]
            found[generation] = min(step, found.get(generation, step))
    return found
