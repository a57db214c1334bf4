"""Random worlds with random faults break no invariant, and a bug that is planted is found, and shrunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flyball.cli.main import run_cli
from simulator.checks.record_checks import Violation
from simulator.driver import Run, run
from simulator.swarm import tries
from simulator.swarm.pool import try_seeds
from simulator.swarm.shrink import fewest
from simulator.swarm.traces import read_trace
from simulator.swarm.trials import ClusterTrial, FleetTrial, Trial, draw, only
from simulator.swarm.tries import Tried, try_out, try_seed
from simulator.swarm.verdicts import EXIT_CODES, SeedVerdict, worst
from tests.simulation.planted_bugs import BUGS, PlantedBug

SEEDS = range(0, 40)
MORE_SEEDS = range(40, 200)  # by make proofs
AT_ONCE = 20
ONCE_FOUND = Path(__file__).parent / "once_found"


@pytest.mark.parametrize(
    "first",
    [*SEEDS[::AT_ONCE], *(pytest.param(first, marks=pytest.mark.proof) for first in MORE_SEEDS[::AT_ONCE])],
)
def test_no_seed_breaks_an_invariant(first: int) -> None:
    failures = [result.failure for result in try_seeds(range(first, first + AT_ONCE), jobs=1) if result.failure]
    assert [(one.repeat, one.shrunk.violations) for one in failures] == []


@pytest.mark.parametrize(("seed", "kept"), [(4, (1, 2)), (64, (7,)), (409, (3, 7, 8, 11))])
def test_what_a_fleet_once_found_stays_mended(seed: int, kept: tuple[int, ...]) -> None:
    """A job that repeats its steps for days, one that is given up behind its newest step, one whose spares do not
    suffice: the checkers took each for a failure."""
    assert try_out(only(draw(seed), kept)).violations == ()


@pytest.mark.parametrize("trace", sorted(ONCE_FOUND.iterdir()), ids=lambda path: path.stem)
def test_what_a_trace_once_found_stays_mended(trace: Path) -> None:
    """By releases that drew other worlds from these seeds. A host that is released as another is cordoned, a job that
    had waited before: the checkers took both for a failure. And (527) an adopted job whose rank had ended: its steps
    were taken for short, and given up at once."""
    read = read_trace(trace)
    assert read is not None
    assert try_out(read.trial).violations == ()


def test_the_seeds_are_not_trivial() -> None:
    """They contain restarts, moves to spares, smaller and larger worlds, changes of the leader, and fleets."""
    trials = [draw(seed) for seed in SEEDS]
    assert sum(isinstance(trial, FleetTrial) for trial in trials) == len(SEEDS) // 5
    clusters = [trial for trial in trials if isinstance(trial, ClusterTrial)]
    assert len({fault.kind for trial in clusters for fault in trial.faults}) > 30
    assert {0, 1} <= {trial.scenario.min_nodes for trial in clusters}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    found = try_out(draw(bug.seed))
    assert bug.invariant in {violation.invariant for violation in found.violations}
    assert found.verdict is not SeedVerdict.CLEAN


def test_a_failed_seed_is_shrunk_and_its_line_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bug = next(bug for bug in BUGS if bug.name == "fails on a notice")
    bug.plant(monkeypatch)
    arguments = ["simulate", "swarm", "--seeds", "1", "--from-seed", str(bug.seed), "--traces", str(tmp_path)]
    assert run_cli(arguments) == EXIT_CODES[SeedVerdict.CRASH]
    printed = capsys.readouterr()
    assert printed.err.startswith(f"flyball: seed {bug.seed}\n")
    assert "shrunk to 1 of" in printed.out
    (repeat,) = (line.split("repeat: flyball ")[1] for line in printed.out.splitlines() if "repeat: " in line)
    assert run_cli(repeat.split()) == EXIT_CODES[SeedVerdict.CRASH]
    assert "shrunk to 1 of 1 faults" in capsys.readouterr().out
    trace = tmp_path / f"seed-{bug.seed}.json"
    assert run_cli(["simulate", "replay", str(trace)]) == EXIT_CODES[SeedVerdict.CRASH]
    assert "crash: KeyError in decide" in capsys.readouterr().out
    monkeypatch.undo()
    assert run_cli(["simulate", "replay", str(trace)]) == 0


def test_a_seed_that_fails_without_a_fault_is_repeated_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def crash(trial: Trial) -> Tried:
        ran.append(len(trial.faults))
        violations = (Violation("crash", "KeyError"),)
        return Tried(trial.seed, "cluster", SeedVerdict.CRASH, violations, len(trial.faults), "", 0.0, 0)

    monkeypatch.setattr(tries, "try_out", crash)
    assert run_cli(["simulate", "swarm", "--seeds", "1"]) == EXIT_CODES[SeedVerdict.CRASH]
    (repeat,) = (line.split("repeat: flyball ")[1] for line in capsys.readouterr().out.splitlines() if "repeat" in line)
    ran.clear()
    assert run_cli(repeat.split()) == EXIT_CODES[SeedVerdict.CRASH]
    assert set(ran) == {0}


def test_a_story_is_of_the_one_run_and_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def counted_run(seed: int, **given: Any) -> Run:  # noqa: ANN401 - as of the driver
        ran.append(seed)
        return run(seed, **given)

    monkeypatch.setattr(tries, "run", counted_run)
    story = ["simulate", "swarm", "--seeds", "1", "--faults", "0", "--story"]
    assert run_cli(story) == 0
    assert "Decision     epoch" in capsys.readouterr().out
    assert ran == [0]
    assert run_cli([*story, "-o", "json"]) == 2
    assert capsys.readouterr().out == ""


def test_the_fewest_faults_are_those_without_which_it_does_not_fail() -> None:
    asked: list[tuple[int, ...]] = []

    def fails(part: tuple[int, ...]) -> bool:
        asked.append(part)
        return {1, 6} <= set(part)

    assert fewest(range(8), fails) == (1, 6)
    assert len(asked) == len(set(asked)) < 25
    assert fewest((3,), lambda part: True) == ()
    assert fewest((), lambda part: True) == ()


def test_a_seed_without_some_of_its_faults_keeps_its_world_and_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = draw(0)
    part = only(trial, (0, 2))
    assert isinstance(trial, ClusterTrial) and isinstance(part, ClusterTrial)
    assert (part.scenario, part.faults) == (trial.scenario, (trial.faults[0], trial.faults[2]))
    ran: list[ClusterTrial] = []

    def run_once(trial: ClusterTrial) -> Tried:
        ran.append(trial)
        return Tried(0, "cluster", SeedVerdict.CLEAN, (), 2, "", 0.0, 0)

    monkeypatch.setattr(tries, "try_out", run_once)
    assert try_seed(0, (0, 2)).failure is None
    assert ran == [part]


@pytest.mark.processes
def test_a_seed_gives_the_same_run_in_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the order of sets differs. One of the seeds is a fleet."""
    here = {result.tried for result in try_seeds((3, 4), jobs=1)}
    monkeypatch.setenv("PYTHONHASHSEED", "2")  # of the processes that are started now
    assert {result.tried for result in try_seeds((3, 4), jobs=2)} == here


def test_a_crash_counts_before_what_must_not_be_and_that_before_what_does_not_end() -> None:
    assert worst(SeedVerdict) is SeedVerdict.CRASH
    assert worst([SeedVerdict.LIVENESS, SeedVerdict.CLEAN, SeedVerdict.CORRECTNESS]) is SeedVerdict.CORRECTNESS
    assert worst([]) is SeedVerdict.CLEAN
    assert len(set(EXIT_CODES.values())) == len(SeedVerdict)


def test_a_time_that_stands_still_is_no_endless_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from simulator.world.events import BEGAN_AT, EventQueue
    from simulator.world.world import World

    after = World.after

    def at_once(self: World, delay_s: float, happening: object) -> None:
        after(self, 0.0 if self.now > BEGAN_AT + 5.0 else delay_s, happening)  # type: ignore[arg-type]

    monkeypatch.setattr(World, "after", at_once)
    assert "livelock" in {violation.invariant for violation in run(0, faults=()).violations}
    assert EventQueue().after_each is None


def test_json_has_everything_and_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["simulate", "swarm", "--seeds", "2", "--from-seed", "14", "--jobs", "1", "-o", "json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["schema"], found["seeds"], found["failed"]) == ("flyball.swarm.v1", 2, 0)
    assert found["worlds"] == {"cluster": 1, "fleet": 1}
    for wrong in (
        ["--faults", "1"],
        ["--seeds", "1", "--faults", "one"],
        ["--seeds", "1", "--faults", "99"],
        ["--story"],
    ):
        assert run_cli(["simulate", "swarm", *wrong]) == 2
        assert "Next step:" in capsys.readouterr().err
