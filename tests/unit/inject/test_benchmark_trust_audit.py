"""What the audit of benchmarks/trust.py finds in the records of a job: each wrong thing, and nothing in a right one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from trust_bench.audit import (
    Audit,
    Execution,
    Generation,
    Sample,
    Unreachables,
    audit,
    doubled_actions,
    read_executions,
)

EXPECTED = {(rank, step): f"0x{step}{rank}" for rank in (0, 1) for step in range(20)}


def executions(*spans: tuple[int, int, int]) -> list[Execution]:
    """(generation, first step, end), by two ranks."""
    return [
        Execution(rank, step, EXPECTED[rank, step], generation)
        for generation, first, end in spans
        for rank in (0, 1)
        for step in range(first, end)
    ]


def audited(found: list[Execution], **fields: Any) -> Audit:  # noqa: ANN401 - of audit
    usual: dict[str, Any] = {
        "generations": [Generation(1, 0.0, -1), Generation(2, 10.0, 8)],
        "samples": [Sample(9.0, 8), Sample(11.0, 8)],
        "diverged": {},
        "unreachables": Unreachables([], []),
        "doubled": [],
    }
    return audit(found, EXPECTED, **(usual | fields))


def wrong(found: Audit) -> dict[str, int]:
    names = ("losses_unequal", "steps_missing", "wrong_restores", "committed_steps_lost", "actions_doubled")
    return {name: value for name in names if (value := getattr(found, name))}


RIGHT = executions((1, 0, 10), (2, 9, 15))


def test_a_restart_from_the_newest_copy_is_right() -> None:
    found = audited(RIGHT)
    assert not wrong(found) and not found.findings
    assert (found.generations, found.steps, found.steps_recomputed) == (2, 15, 2)


@pytest.mark.parametrize(
    ("found", "fields", "counts"),
    [
        ([*RIGHT, Execution(0, 15, "0x1", 2)], {}, {"losses_unequal": 1}),
        ([e for e in RIGHT if (e.rank, e.step) != (1, 4)], {}, {"steps_missing": 1}),
        (executions((1, 0, 10), (2, 8, 15)), {}, {"wrong_restores": 1}),
        (RIGHT, {"samples": [Sample(9.0, 9)]}, {"committed_steps_lost": 1}),
        (RIGHT, {"doubled": ["rank 0 of generation 2 was started 2 times"]}, {"actions_doubled": 1}),
    ],
)
def test_what_is_wrong_is_counted(found: list[Execution], fields: dict[str, Any], counts: dict[str, int]) -> None:
    assert wrong(audited(found, **fields)) == counts


def test_a_copy_that_went_with_its_host_was_not_lost_by_the_restart() -> None:
    samples = [Sample(9.0, 9), Sample(11.0, 8)]
    assert wrong(audited(RIGHT, samples=samples)) == {"committed_steps_lost": 1}
    assert not wrong(audited(RIGHT, samples=samples, unreachables=Unreachables([9.5], [])))
    assert not wrong(audited(RIGHT, samples=[Sample(9.0, 9)], unreachables=Unreachables([], [5.0])))
    assert not wrong(audited(RIGHT, samples=[Sample(9.0, 9)], unreachables=Unreachables([], [], [(8.0, 20.0)])))
    assert wrong(audited(RIGHT, samples=[Sample(9.0, 9)], unreachables=Unreachables([], [], [(1.0, 8.0)])))


def test_what_followed_a_nan_is_wrong_on_purpose() -> None:
    found = [*executions((1, 0, 6)), Execution(0, 6, "nan", 1), Execution(1, 6, "nan", 1), *executions((2, 3, 9))]
    fields = {"generations": [Generation(1, 0.0, -1), Generation(2, 10.0, 2)], "samples": [Sample(9.0, 6)]}
    assert not wrong(audited(found, diverged={1: 5}, **fields))
    assert wrong(audited(found, **fields)) == {"losses_unequal": 2, "committed_steps_lost": 4}


def test_a_second_start_and_a_second_obedience_are_found(tmp_path: Path) -> None:
    spawns, log = tmp_path / "spawns.txt", tmp_path / "host-a.log"
    spawns.write_text("1 0 100\n1 1 101\n2 0 102\n2 0 103\n")
    obeyed = {"event": "command", "id": "act-1.start.host-a.1", "state": "new"}
    log.write_text("\n".join(json.dumps(line) for line in (obeyed, obeyed, {**obeyed, "id": "act-2"})) + '\n{"even')
    assert doubled_actions(spawns, [log]) == [
        "rank 0 of generation 2 was started 2 times",
        "host-a obeyed act-1.start.host-a.1 2 times",
    ]
    (tmp_path / "rank1.txt").write_text("0 0x1p+0 1\n1 0x1p")
    assert read_executions(tmp_path) == [Execution(1, 0, "0x1p+0", 1)], "not the half line"


def test_a_harm_that_a_restart_brought_back_is_excused_in_both_generations() -> None:
    """A NaN at step 8, a restart from step 9 by another fault, and only then is it noticed: back to step 6."""
    found = [
        Execution(e.rank, e.step, "nan", e.generation) if e.generation < 3 and e.step > 7 else e
        for e in executions((1, 0, 10), (2, 10, 12), (3, 7, 15))
    ]
    generations = [Generation(1, 0.0, -1), Generation(2, 10.0, 9), Generation(3, 20.0, 6)]
    assert not wrong(audited(found, generations=generations, diverged={2: 6}))
    assert wrong(audited(found, generations=generations, diverged={})) == {
        "losses_unequal": 8,
        "committed_steps_lost": 2,
    }
    before = [*found, Execution(0, 5, "nan", 1)]
    assert wrong(audited(before, generations=generations, diverged={2: 6})) == {"losses_unequal": 1}
