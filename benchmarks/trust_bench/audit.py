"""What must hold after a campaign, read from outside: the ranks' own records, the database, the hosts' logs. Pure but
for reading."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class Execution(NamedTuple):
    """A rank has computed a step once. `loss` is a hexadecimal float: nothing is rounded."""

    rank: int
    step: int
    loss: str
    generation: int


class Sample(NamedTuple):
    """The newest step that could be restored, as `flyball ckpt ls` finds it in slots and folders; -1: none."""

    at: float
    step: int


class Generation(NamedTuple):
    """As granted by the supervisor."""

    number: int
    granted_at: float
    restore_step: int  # -1: from the beginning


class Unreachables(NamedTuple):
    """Faults after which a copy that was listed may be gone, or may not be what it says."""

    hosts_lost_at: Sequence[float]
    shards_damaged_at: Sequence[float]
    hosts_cut: Sequence[tuple[float, float]] = ()  # from, to: its copies are listed, but nobody reaches them


class Audit(msgspec.Struct, frozen=True):
    """Counts, each of which should be 0 but for the first four; `findings` say which."""

    generations: int
    executions: int
    steps: int
    steps_recomputed: int  # executions of all ranks beyond the first of each step
    losses_unequal: int
    steps_missing: int
    wrong_restores: int
    committed_steps_lost: int
    actions_doubled: int
    findings: tuple[str, ...]


def read_executions(losses_dir: Path) -> list[Execution]:
    found = []
    for file in sorted(losses_dir.glob("rank*.txt")):
        rank = int(file.stem.removeprefix("rank"))
        for line in file.read_text().rpartition("\n")[0].splitlines():
            step, loss, generation = line.split()
            found.append(Execution(rank, int(step), loss, int(generation)))
    return found


def audit(
    executions: Sequence[Execution],
    expected: Mapping[tuple[int, int], str],
    *,
    generations: Sequence[Generation],
    samples: Sequence[Sample],
    diverged: Mapping[int, int],
    unreachables: Unreachables,
    doubled: Sequence[str],
) -> Audit:
    """`expected`: (rank, step) -> the loss of the uninterrupted run. `diverged`: generation -> the last good step of
    those that a NaN ended: what follows is wrong on purpose, and is computed again."""
    findings: list[str] = list(doubled)
    harmed = _with_ancestors(diverged, generations)
    counted = [e for e in executions if e.step <= harmed.get(e.generation, e.step)]
    unequal = [e for e in counted if expected.get((e.rank, e.step)) != e.loss]
    findings += [f"rank {e.rank}, step {e.step}, generation {e.generation}: loss {e.loss}" for e in unequal[:20]]
    steps = defaultdict(set)
    for execution in counted:
        steps[execution.rank].add(execution.step)
    missing = sum(1 + max(done) - len(done) for done in steps.values())
    firsts: dict[int, dict[int, Execution]] = defaultdict(dict)
    for execution in executions:  # in the order in which they were written
        firsts[execution.generation].setdefault(execution.rank, execution)
    wrong, lost = 0, 0
    for generation in generations:
        ranks = firsts.get(generation.number, {})
        if odd := [e for e in ranks.values() if e.step != generation.restore_step + 1]:
            wrong += 1
            findings.append(f"generation {generation.number} was to restore {generation.restore_step}: {odd}")
        if generation.number - 1 in diverged or generation.number == 1:
            continue  # it went back on purpose, or had nothing to restore
        gone = max(0, _recoverable(generation.granted_at, samples, unreachables) - generation.restore_step)
        lost += gone
        if gone:
            findings.append(f"generation {generation.number} restored {generation.restore_step}, {gone} steps too old")
    return Audit(
        generations=len(generations),
        executions=len(executions),
        steps=1 + max((e.step for e in executions), default=-1),
        steps_recomputed=len(executions) - len({(e.rank, e.step) for e in executions}),
        losses_unequal=len(unequal),
        steps_missing=missing,
        wrong_restores=wrong,
        committed_steps_lost=lost,
        actions_doubled=len(doubled),
        findings=tuple(findings),
    )


def _with_ancestors(diverged: Mapping[int, int], generations: Sequence[Generation]) -> dict[int, int]:
    """A generation that restored a step beyond the last good one got the harm from the generation before it."""
    found = dict(diverged)
    for child, parent in zip(generations[::-1], generations[-2::-1], strict=False):
        if child.number in found and child.restore_step > found[child.number]:
            found.setdefault(parent.number, found[child.number])
    return found


def _recoverable(at: float, samples: Sequence[Sample], unreachables: Unreachables) -> int:
    """The newest step that was there when a generation was granted. A host that was lost, or a shard that was damaged,
    after the last look before it leaves only what the first look after it still finds."""
    before = [s for s in samples if s.at <= at]
    after = [s for s in samples if s.at > at]
    if not before:
        return -1
    window_s = 10.0  # a damaged slot is listed until it is overwritten, two saves later
    if any(at - window_s <= damaged <= at for damaged in unreachables.shards_damaged_at):
        return -1
    if any(begin <= at <= end for begin, end in unreachables.hosts_cut):
        return -1
    if after and any(before[-1].at - 1.0 <= lost <= at + 1.0 for lost in unreachables.hosts_lost_at):
        return min(before[-1].step, after[0].step)
    return before[-1].step


def doubled_actions(spawns: Path, host_logs: Iterable[Path]) -> list[str]:
    """Ranks that were started twice in a generation, and commands that a host obeyed twice."""
    lines = spawns.read_text().splitlines() if spawns.exists() else []
    started = Counter(tuple(line.split()[:2]) for line in lines)
    found = [f"rank {r} of generation {g} was started {n} times" for (g, r), n in started.items() if n > 1]
    for log in host_logs:
        obeyed: Counter[str] = Counter()
        for line in log.read_text(errors="replace").splitlines():
            if '"command"' not in line:
                continue
            try:
                record: dict[str, Any] = json.loads(line)
            except ValueError:  # a killed process left half a line
                continue
            if record.get("event") == "command" and record.get("state") == "new":
                obeyed[str(record["id"])] += 1
        found += [f"{log.stem} obeyed {command} {n} times" for command, n in obeyed.items() if n > 1]
    return found
