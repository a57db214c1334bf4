"""Training jobs and what their ranks wrote down, and the uninterrupted runs that they are compared with."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from support.clocks.waits import DEADLINE_S, until
from support.commands.log_lines import whole_lines
from support.commands.own_processes import kill_all, processes_with
from support.commands.run_folders import clean_environment

from flyball.contracts.errors import Unreachable

if TYPE_CHECKING:
    from support.servers.stack import Stack

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"
SMALL = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "24", "--batch-size", "1", "--seed", "7")
QUIET = ("--print-every", "1000000")
# One thread per rank, as torchrun has it; and no probe sees this machine, whose load would be signals among the faults.
ALIKE = {"OMP_NUM_THREADS": "1", "FLYBALL_PROBE_ROOT": "/nowhere"}

Losses = Mapping[tuple[int, int], set[str]]  # (rank, step) -> every loss that was ever computed for it


def read_losses(folder: Path) -> Losses:
    losses: dict[tuple[int, int], set[str]] = defaultdict(set)
    for file in folder.glob("rank*.txt"):
        for line in whole_lines(file):
            step, loss, _ = line.split()
            losses[int(file.stem.removeprefix("rank")), int(step)].add(loss)
    return losses


def is_closed(incident: Mapping[str, Any]) -> bool:
    return incident["state"] in ("resolved", "escalated")


class Reference:
    """The uninterrupted runs: plain torchrun, the same seed, one per world size, each only as far as it is needed. All
    processes of one test session share them: with what one has waited for, another goes on."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._torchruns: dict[int, subprocess.Popen[bytes]] = {}  # that were started here

    def losses(self, world_size: int, steps: int) -> Losses:
        """Those of at least so many steps."""
        folder = self._folder(world_size)

        def has_steps() -> Losses | None:
            losses = read_losses(folder)
            if all((rank, steps - 1) in losses for rank in range(world_size)):
                return losses
            assert self._processes(folder), folder.with_suffix(".log").read_text()
            return None

        with self._alone(folder):
            if not self._processes(folder):
                self._torchruns[world_size] = self._start(world_size, folder)
            self._send(folder, signal.SIGCONT)
            losses = until(has_steps, f"step {steps} of the uninterrupted run")
            self._send(folder, signal.SIGSTOP)
        return losses

    def _folder(self, world_size: int) -> Path:
        return self._root / f"{world_size}-ranks"

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        with folder.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _start(self, world_size: int, folder: Path) -> subprocess.Popen[bytes]:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
        arguments = ("--steps", "1000000", *SMALL, *QUIET, "--losses-dir", str(folder))
        with folder.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(
                [*torchrun, str(EXAMPLE), *arguments],
                env=clean_environment(**ALIKE, RECOVERY_REFERENCE=str(folder)),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _processes(self, folder: Path) -> list[psutil.Process]:
        return processes_with(f"RECOVERY_REFERENCE={folder}")

    def _send(self, folder: Path, number: signal.Signals) -> None:
        for process in self._processes(folder):
            process.send_signal(number)

    def end(self) -> None:
        """Of what was started here; another process that needs more steps begins again."""
        for world_size, torchrun in self._torchruns.items():
            folder = self._folder(world_size)
            with self._alone(folder):
                kill_all(lambda folder=folder: self._processes(folder))
                torchrun.wait(DEADLINE_S)


class RecordedJob:
    """A training job, and what its ranks wrote down."""

    def __init__(self, stack: Stack, name: str, world_size: int) -> None:
        self.stack = stack
        self.name = name
        self.world_size = world_size
        self.folder = stack.root / f"job-{name}"
        self.folder.mkdir()
        self.losses_dir = self.folder / "losses"

    def arm(self, fault: str, rank: int) -> None:
        """Have a rank meet this fault at its next step; see armed_gpt.py."""
        (self.folder / f"{fault}.rank{rank}").touch()

    def get(self) -> dict[str, Any]:
        return dict(self.stack.api.get(f"/v1/jobs/{self.name}"))

    def host_of(self, rank: int) -> str:
        return next(str(r["host_id"]) for r in self.get()["ranks"] if r["rank"] == rank)

    def pid_of(self, rank: int) -> int:
        """Of the newest process of a rank, from its own record."""
        return [pid for _, r, pid in self.spawns() if r == rank][-1]

    def spawns(self) -> list[tuple[int, int, int]]:
        """(generation, rank, pid) of every process that was started for the job, in order."""
        lines = whole_lines(self.folder / "spawns.txt")
        return [(int(g), int(r), int(p)) for g, r, p in (line.split() for line in lines)]

    def executed(self) -> list[int]:
        """The step that each rank executed last."""
        newest = []
        for rank in range(self.world_size):
            file = self.losses_dir / f"rank{rank}.txt"
            lines = whole_lines(file) if file.exists() else []
            newest.append(int(lines[-1].split()[0]) if lines else -1)
        return newest

    def train_on(self, steps: int = 5) -> None:
        """Wait until every rank has done so many steps more."""
        goal = max(self.executed()) + steps

        def reached() -> bool:
            self.stack.check()
            return min(self.executed()) >= goal

        until(reached, f"step {goal} of {self.name}")

    def incidents(self) -> list[dict[str, Any]]:
        return self.stack.api.items("/v1/incidents", job=self.name)

    @contextmanager
    def next_incident(self) -> Iterator[dict[str, Any]]:
        """Meets a fault inside the block; at its end the incident that followed is closed, and in the dictionary, with
        what each rank restored: that is told after the steps that close it, as a rule."""
        until(lambda: all(map(is_closed, self.incidents())), f"no open incident of {self.name}")
        known = {incident["incident_id"] for incident in self.incidents()}
        incident: dict[str, Any] = {}
        yield incident

        def closed() -> dict[str, Any] | None:
            try:
                new = [i for i in self.incidents() if i["incident_id"] not in known]
            except Unreachable:
                return None  # it is being started again
            assert len(new) <= 1, new
            return new[0] if new and is_closed(new[0]) and self._has_told_restores(new[0]) else None

        try:
            incident.update(until(closed, f"the end of an incident of {self.name}"))
        except AssertionError as error:
            raise AssertionError(f"{error}; there is {self.incidents()} of {self.get()}") from None

    def _has_told_restores(self, incident: Mapping[str, Any]) -> bool:
        return incident["restored_step"] < 0 or len(incident["restored_from"]) == self.world_size

    def decisions(self, incident: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Those of an incident that were acted on."""
        found = self.stack.api.items("/v1/decisions", job=self.name)
        return [d for d in found if d["incident_id"] == incident["incident_id"] and d["kind"] != "hold"]

    def check_losses(self, reference: Reference) -> Losses:
        """Every execution of every step has the loss of the uninterrupted run, to the last bit, and none is missing."""
        losses = read_losses(self.losses_dir)
        expected = reference.losses(self.world_size, 1 + max(step for _, step in losses))
        assert losses == {key: expected[key] for key in losses}
        for rank in range(self.world_size):
            steps = {step for r, step in losses if r == rank}
            assert steps == set(range(max(steps) + 1))
        return losses

    def check_goodput(self) -> dict[str, Any]:
        """Every second of the job is in exactly one category."""
        report: dict[str, Any] = self.stack.api.get("/v1/goodput", job=self.name)
        assert sum(report["seconds_by_category"].values()) == pytest.approx(report["elapsed_s"], abs=1e-6)
        assert report["seconds_by_category"]["useful"] > 0
        return report
