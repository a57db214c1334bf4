"""How the shoot-out of benchmarks/trust.py strikes a launcher, and what it makes of one that breaks.

Each launcher here is two shell scripts, one a host, that make their steps together. That of the first host writes the
lines of rank 0, and when the second host hands rank 1 over, or is gone, its lines too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from trust_bench import race as shoot_out
from trust_bench.interruption import Interruption
from trust_bench.peers import Course, Peer
from trust_bench.race import FAULTS, RaceRun, race

pytestmark = pytest.mark.processes

FIRST_HOST = """
mkdir -p losses; n=0
while :; do
  echo "$n 0x0 $$" >> losses/rank0.txt
  until [ "$(tail -n 1 losses/rank1.txt 2>/dev/null | cut -d ' ' -f 1)" = "$n" ]; do
    if [ -e handed ] || { [ -e second ] && ! kill -0 "$(cat second)" 2>/dev/null; }; then
      echo "$n 0x0 $$" >> losses/rank1.txt
    fi
    sleep 0.01
  done
  n=$((n+1)); sleep 0.02
done
"""
RANK_1 = """
echo $$ > second.new; mv second.new second; last=
while [ ! -e handed ]; do
  n=$(tail -n 1 losses/rank0.txt 2>/dev/null | cut -d ' ' -f 1)
  if [ "$n" != "$last" ] && [ "$n" -lt "$STAND_AT" ]; then echo "$n 0x0 $$" >> losses/rank1.txt; last=$n; fi
  sleep 0.01
done
"""


def run_race(second_host: str, faults: tuple[str, ...]) -> RaceRun:
    """With a save at each step, so that each is the right one to strike at."""

    def command(course: Course, python: str, host: int) -> list[str]:
        return ["sh", "-c", second_host if host else FIRST_HOST]

    cannot = {fault: "not tried" for fault in FAULTS if fault not in faults}
    return race(
        Peer("two-scripts", command, 2, False, {"STAND_AT": "1000000"}, "", cannot),
        sys.executable,
        repetition=1,
        hang_timeout_s=10.0,
        save_every=1,
        say=lambda _: None,
        interruption=Interruption(lambda _: None),
    )


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoot_out, "CALM_S", 0.2)
    monkeypatch.setattr(shoot_out, "STORE_DEADLINE_S", 0.0)  # there is none


def test_a_launcher_that_leaves_no_other_host_to_strike_keeps_what_was_measured() -> None:
    run = run_race(RANK_1, ("kill", "host"))
    kill, _, _, host = run.recoveries
    assert kill.next_step_s is not None and run.steps_kept > 0
    assert host.next_step_s is None and "no live rank on another host" in host.why


def test_a_job_that_stands_is_not_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoot_out, "RECOVERY_DEADLINE_S", 0.5)
    (kill, *_) = run_race(f"STAND_AT=1; {RANK_1}", ("kill",)).recoveries
    assert kill.next_step_s is None and "was not made within" in kill.why


def test_after_a_notice_a_host_has_the_time_to_end_in_order(tmp_path: Path) -> None:
    """The job is back at once; the host ends when the job has made ten steps more."""
    ended = tmp_path / "ended"
    leave = f"""
    trap : TERM
    at=$(wc -l < losses/rank0.txt)
    while [ "$(wc -l < losses/rank0.txt)" -lt $((at+10)) ]; do sleep 0.02; done
    echo > {ended}
    """
    run = run_race(f"trap 'touch handed' TERM; {RANK_1} {leave}", ("notice",))
    assert ended.exists()
    assert run.recoveries[-1].next_step_s is not None and run.elapsed_s < shoot_out.NOTICE_S


def test_a_host_that_stays_after_its_notice_is_killed_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoot_out, "NOTICE_S", 1.5)
    run = run_race(f"trap 'touch handed' TERM; {RANK_1} sleep 600; sleep 600", ("notice",))
    notice = run.recoveries[-1]
    assert run.elapsed_s > 1.5  # from the first step, to one after the kill
    assert notice.next_step_s is not None and notice.next_step_s < 1.5  # the first one after the notice
    assert notice.alone_s is None
