"""Loops that write to their state behind the engine's back, each under `flyball run` and killed at random moments: what
is restored is the state at the call of `save`, byte for byte. All copies are verified at the end, which alone would
prove nothing.

`make corpus` kills each way ten times; the proofs kill each fourth of them three times."""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clocks.waits import until
from support.commands.flyball import FlyballProcess, run_flyball
from support.commands.run_folders import run_folder

HERE = Path(__file__).parent
WAYS = sorted(f"{path.parent.name}/{path.stem}" for path in HERE.glob("*/*.py"))
IS_WHOLE = os.environ.get("FLYBALL_CORPUS") == "all"
KILLS = 10 if IS_WHOLE else 3
TODAY = WAYS if IS_WHOLE else WAYS[::4]

pytestmark = pytest.mark.proof


def facts_of(way: str) -> dict[str, Any]:
    """The constants of a way, without importing it."""
    found = {"RANKS": 1, "NEEDS": ""}
    for node in ast.parse((HERE / f"{way}.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in found:
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def is_there(needed: str) -> bool:
    if needed in ("cuda", "triton"):
        return torch.cuda.is_available()
    return not needed or shutil.which(needed) is not None


def test_the_corpus_has_its_ways() -> None:
    assert len(WAYS) >= 80 and not {facts_of(way)["NEEDS"] for way in WAYS} - {"", "cc", "cuda", "triton"}


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as made:
        yield made


@pytest.mark.parametrize("way", TODAY)
def test_what_is_restored_is_the_state_at_the_call(way: str, place: Path) -> None:
    facts = facts_of(way)
    if not is_there(facts["NEEDS"]):
        pytest.skip(f"this machine has no {facts['NEEDS']}")
    ranks, chance = facts["RANKS"], random.Random(way)
    notes = place / "notes"
    notes.mkdir()

    def restores(rank: int) -> list[dict[str, Any]]:
        path = notes / f"restores.rank{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def newest(rank: int) -> int:
        return max((int(path.stem) for path in notes.glob(f"*.rank{rank}") if path.stem.isdigit()), default=-1)

    def has_gone_on(since: int) -> Callable[[], bool]:
        return lambda: all(newest(rank) > since + 2 for rank in range(ranks))

    words = ("--job", "corpus", "--nproc-per-node", str(ranks), "--max-restarts", "1000", "--no-local-ckpt")
    with FlyballProcess(place, "run", *words, str(HERE / "run_way.py"), way, str(notes)) as run:
        run.wait_for(has_gone_on(2), "the first steps")
        for kill in range(1, KILLS + 1):
            time.sleep(chance.uniform(0.0, 0.15))  # any moment
            victim = chance.randrange(ranks)
            os.kill(int((notes / f"pid.rank{victim}").read_text()), signal.SIGKILL)
            run.wait_for(lambda kill=kill: all(len(restores(rank)) >= kill for rank in range(ranks)), f"restore {kill}")
            since = max(restores(rank)[-1]["step"] for rank in range(ranks))
            run.wait_for(has_gone_on(since), f"steps after restore {kill}")
        for rank in range(ranks):
            os.kill(int((notes / f"pid.rank{rank}").read_text()), signal.SIGSTOP)
        verified = json.loads(run_flyball(place, "ckpt", "verify", "--all", "-o", "json").stdout)["copies"]
        run.send(signal.SIGINT)
    until(lambda: not run.is_running)
    found = [restore for rank in range(ranks) for restore in restores(rank)]
    assert len(found) >= KILLS * ranks
    assert [restore for restore in found if restore["wrong"]] == []
    assert verified and [copy for copy in verified if copy["verdict"] == "bad"] == []
