"""Trainers that write their own event file, as real processes: killed with -9, under torchrun, many at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.clocks.waits import until

from flyball.contracts.clock import SystemClock
from flyball.contracts.events import Event, EventKind
from goodput.calculator import calculate
from goodput.read.event_files import read_logs

DEADLINE_S = 300.0

TRAINER = '''
"""Steps of 50 ms. Saves every fifth step to a file of its own, loads it, and kills itself as told: once, and only when
all that it did is in the event file."""
import json, os, signal, sys, time
from pathlib import Path
import flyball

def is_told(step):
    place = Path(os.environ["FLYBALL_EVENTS"])
    files = place.glob("*.jsonl") if place.is_dir() else [place]
    whole = [file.read_text().rpartition("\\n")[0] for file in files]  # another rank may be in the middle of a line
    events = [json.loads(line) for text in whole for line in text.splitlines()]
    steps = [(e["rank"], e["data"]) for e in events if e["kind"] == "steps"]
    told = [(rank, data["first_step"] + len(data["completed_at"]) - 1) for rank, data in steps]
    return all((rank, step) in told for rank in range(int(os.environ["WORLD_SIZE"])))

folder, until = Path(sys.argv[1]), int(sys.argv[2])
kill_rank, kill_step = (int(argument) for argument in sys.argv[3:5])
rank = int(os.environ.get("RANK", "0"))
group = int(os.environ.get("WORLD_SIZE", "1")) > 1
if group:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
job = flyball.attach()
saved = folder / f"saved-{rank}"
with job.phase("restore"):
    start = int(saved.read_text()) + 1 if saved.exists() else 0
for step in range(start, until):
    if rank == kill_rank and step == kill_step and not (folder / "killed").exists():
        (folder / "killed").touch()
        while not is_told(step - 1):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    if group:
        dist.barrier()
    job.step(step)
    if step % 5 == 4:
        with job.phase("checkpoint"):
            time.sleep(0.02)
            saved.with_suffix(".new").write_text(str(step))
            saved.with_suffix(".new").rename(saved)
job.close()
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINER)
    return path


def environment(events: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "SLURM", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        clean.pop(name, None)
    # Restarts that share the agent's store find the addresses of their dead predecessors in it.
    ours = {"FLYBALL_JOB": "toy", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**clean, **ours, "FLYBALL_EVENTS": str(events)}


def told(events: Path, kind: EventKind) -> list[Event]:
    return [e for e in read_logs([events]).events if e.kind is kind] if events.exists() else []


def newest_step(events: Path) -> int:
    steps = told(events, EventKind.STEPS)
    return max((e.data["first_step"] + len(e.data["completed_at"]) - 1 for e in steps), default=-1)


def test_a_trainer_killed_with_minus_9_leaves_a_log_whole_but_for_its_last_line(script: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    command = [sys.executable, str(script), str(tmp_path), "100000", "-1", "-1"]
    with subprocess.Popen(command, env=environment(events)) as trainer:
        until(lambda: newest_step(events) >= 20)
        trainer.send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    until(lambda: time.monotonic() > killed_s + 0.1)  # the start of a process is known to 0.01 s only
    assert read_logs([events]).malformed_count <= 1  # the line that the kill cut off

    # It goes on from the save, which may be newer than what was told last.
    saved = int((tmp_path / "saved-0").read_text())
    enough = max(newest_step(events), saved) + 10
    done = subprocess.run([*command[:3], str(enough), "-1", "-1"], env=environment(events), check=False)
    assert done.returncode == 0
    report = calculate(read_logs([events]).events)
    (incident,) = report.incidents
    assert (report.outcome, report.interruptions, incident.cause) == ("succeeded", 1, "restart")
    assert report.steps.recomputed == incident.lost_steps and 0 <= report.steps.recomputed <= 5 + 40
    assert sum(report.seconds_by_category.values()) == pytest.approx(report.elapsed_s)
    # From the kill to the restart nothing is known, and the new process takes its time to start.
    assert report.seconds_by_category["unknown"] > 0 and report.seconds_by_category["restart"] > 0
    assert report.seconds_by_category["checkpoint_blocked"] > 0


@pytest.mark.proof
@pytest.mark.parametrize("place", ["events.jsonl", "events/"])
def test_a_torchrun_restart_of_two_ranks_is_told_as_it_was(place: str, script: Path, tmp_path: Path) -> None:
    events = tmp_path / place
    if place.endswith("/"):
        events.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(script), str(tmp_path), "40", "1", "23"]
    began_at = SystemClock().wall_s()
    done = subprocess.run(command, env=environment(events), check=False, timeout=DEADLINE_S, capture_output=True)
    ended_at = SystemClock().wall_s()
    assert done.returncode == 0, done.stderr.decode()[-2000:]

    log = read_logs([events])
    started = [e for e in log.events if e.kind is EventKind.GENERATION_STARTED]
    assert [(e.generation, e.data["world_size"]) for e in started] == [(1, 2), (2, 2)]
    assert {(e.generation, e.rank) for e in log.events if e.kind is EventKind.STEPS} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    report = calculate(log.events)
    # The truth: rank 1 died before it completed step 23, and both went on from step 19.
    assert report.steps.newest == 39 and report.outcome == "succeeded"
    (incident,) = report.incidents
    assert report.interruptions == 1 and incident.cause == "restart" and incident.outcome == "resolved"
    assert incident.lost_steps == 3  # 20 to 22
    assert report.steps.kept == 40 and report.steps.recomputed == 3
    seconds = report.seconds_by_category
    assert 40 * 0.05 <= seconds["useful"] + seconds["checkpoint_blocked"] <= ended_at - began_at
    assert began_at - 0.1 <= report.started_at <= report.ended_at <= ended_at
    assert sum(seconds.values()) == pytest.approx(report.elapsed_s)


def test_ranks_that_write_to_one_file_at_once_write_whole_lines(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    writer = (
        "import sys, os\nfrom flyball.sdk.event_file import _Appender\nfrom pathlib import Path\n"
        "appender = _Appender(Path(sys.argv[1]))\n"
        "for n in range(300):\n"
        "    appender.write(iter([(sys.argv[2] * (n * 7 % 5000) + '\\n').encode() for _ in range(3)]))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", writer, str(events), letter]) for letter in "abcd"]
    assert [process.wait(DEADLINE_S) for process in writers] == [0, 0, 0, 0]
    lines = events.read_text().splitlines()
    assert all(len(set(line)) <= 1 for line in lines)
    assert sum(map(len, lines)) == 4 * 3 * sum(n * 7 % 5000 for n in range(300))


def test_a_full_disk_does_not_stop_training(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script), str(tmp_path), "5", "-1", "-1"]
    done = subprocess.run(command, env=environment(Path("/dev/full")), check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("cannot be written: No space left on device. Training goes on.") == 1


def test_the_file_is_what_the_command_line_reads(script: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, str(script), str(tmp_path), "12", "-1", "-1"], env=environment(events), check=True)
    command = [sys.executable, "-m", "flyball.cli.main", "goodput", str(events), "-o", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["job"] == "toy" and report["steps"]["kept"] == 12
