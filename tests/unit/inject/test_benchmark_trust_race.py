"""What benchmarks/trust.py reads from the ranks' lines, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import trust
from trust_bench import stack
from trust_bench.peers import PEERS, python_of
from trust_bench.race import FAULTS, RaceRun, Recovery, moment_of
from trust_bench.track import Track

from flyball.contracts.errors import UsageError
from services.settings import Settings


class Ranks:
    """Two ranks that write lines, and the pids that are alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.alive: set[int] = set()
        self.track = Track(folder, self.alive.__contains__)

    def write(self, rank: int, step: int, pid: int) -> None:
        with (self.folder / f"rank{rank}.txt").open("a") as file:
            file.write(f"{step} 0x1p+0 {pid}\n")
        self.track.pull()

    @property
    def done(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(one.step, one.pids) for one in self.track.done]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    found = Ranks(tmp_path)
    found.alive |= {10, 20}
    for step in (0, 1):
        found.write(0, step, 10)
        found.write(1, step, 20)
    assert found.done == [(0, (10, 20)), (1, (10, 20))]
    return found


def test_the_last_line_of_a_killed_rank_is_none_of_the_restarts(ranks: Ranks) -> None:
    ranks.write(0, 2, 10)
    ranks.alive ^= {10, 20, 11, 21}
    ranks.write(1, 2, 21)
    assert ranks.track.newest == 1
    ranks.write(0, 2, 11)
    assert ranks.done[-1] == (2, (11, 21))


def test_a_restart_that_is_restarted_before_all_ranks_have_made_a_step(ranks: Ranks) -> None:
    ranks.alive ^= {10, 20, 11}
    ranks.write(0, 1, 11)
    ranks.alive ^= {11, 12, 22}
    ranks.write(1, 1, 22)  # beside the line of 11, which is gone
    ranks.write(0, 1, 12)
    for rank, pid in ((0, 12), (1, 22)):
        ranks.write(rank, 2, pid)
    assert ranks.done[2:] == [(1, (12, 22)), (2, (12, 22))]


def test_a_rank_that_comes_back_beside_one_that_trained_on(ranks: Ranks) -> None:
    ranks.alive ^= {20, 21}
    for step in (2, 3, 4):
        ranks.write(0, step, 10)
    ranks.write(1, 4, 21)
    assert ranks.done[-1] == (4, (10, 21))


def test_half_a_line_is_read_when_it_is_whole(ranks: Ranks) -> None:
    ranks.write(0, 2, 10)
    with (ranks.folder / "rank1.txt").open("a") as file:
        file.write("2 0x1p")
        file.flush()
        ranks.track.pull()
        assert ranks.track.newest == 1
        file.write("+0 20\n")
    ranks.track.pull()
    assert ranks.track.newest == 2


def test_all_peers_are_struck_at_the_same_moments_of_a_save_interval() -> None:
    moments = [moment_of(fault, repetition, 12) for fault in FAULTS for repetition in range(1, 6)]
    assert moments == [moment_of(fault, repetition, 12) for fault in FAULTS for repetition in range(1, 6)]
    assert len({m.steps_after_save for m in moments}) > 6 and all(0 <= m.steps_after_save < 12 for m in moments)


@pytest.mark.processes
def test_a_peer_that_is_not_installed_is_refused_before_the_race() -> None:
    with pytest.raises(UsageError, match=r"nvrx cannot be run by .*not installed") as refused:
        python_of(PEERS["nvrx"]._replace(module="no_such_module"), {})
    assert "--python nvrx=" in refused.value.hint
    with pytest.raises(UsageError, match="nvrx cannot be run by"):
        python_of(PEERS["nvrx"], {"nvrx": "/no/such/python"})
    assert python_of(PEERS["torchrun"], {}) == sys.executable


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("shootout --python nvrx", "'nvrx' is not PEER=FILE"),
        ("shootout --python nvxr=/bin/sh", "'nvxr=/bin/sh' is not PEER=FILE"),
        ("shootout --python nvrx=/no/such", "there is no interpreter /no/such"),
        ("shootout --repeats 0", "'0'"),
        ("chaos --faults 0", "a whole number above 0 is needed, and this is '0'"),
        ("chaos --duration 0s", "must be above 0"),
        ("chaos --record /no/such/file", "nothing can be appended to /no/such/file"),
    ],
)
def test_bad_input_is_refused_at_once(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trust.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        trust.parse()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_table_of_a_launcher_says_what_it_survived_and_what_not() -> None:
    def run(repetition: int, *recoveries: Recovery) -> RaceRun:
        return RaceRun("torchft", repetition, 5.0, recoveries, 100.0, 500, 0.1, 0.5)

    runs = [
        run(1, Recovery("kill", 2.0, 1, alone_s=1.5), Recovery("exception", None, None, "no step")),
        run(2, Recovery("kill", 4.0, 0), Recovery("exception", 3.0, 0)),
    ]
    found = trust.figures(runs, runs)
    assert found["kill"] == "3.00 ± 12.71 s, 0.50 ± 6.35 steps lost, 2 of 2"
    assert found["kill, the other alone"] == "1.50 s, 1 of 2"
    assert found["exception"] == "3.00 s, 0.00 steps lost, 1 of 2: no step"
    assert (found["host"], found["goodput"]) == ("-: not reached", "50.00 ± 0.00 %")
    assert trust.figures([], runs) == {"measured": "no"}


def test_the_hours_limit_of_actions_does_not_end_a_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in stack.LIMITS.items():
        monkeypatch.setenv(name, value)
    assert Settings().policy_settings.max_actions_per_hour == 100_000
