"""Where ranks stand: recorded stacks are read, and stacks of real processes are taken."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.clocks.waits import until

from flyball.contracts.on_host.segments import STACKS_SUFFIX
from flyball.contracts.reports.rank_stands import MAX_STACK_CHARS, RankStand
from host_daemon.kernel.processes import read_stat
from host_daemon.kernel.worker_reads import WorkerReads
from host_daemon.workers import stacks
from host_daemon.workers.stack_reading import Frame, SeenProcess, main_thread, stand_of
from host_daemon.workers.stacks import StackSource, answers_requests, take_stands, trigger_flight_recorder

STACKS = Path(__file__).parents[2] / "stacks"
ASLEEP = SeenProcess("S", "futex")
TORCH, HOME = "/opt/venv/lib/python3.11/site-packages/torch", "/home/me"
DEADLINE_S = 60.0


def recorded(name: str, process: SeenProcess) -> RankStand:
    return stand_of(2, main_thread((STACKS / f"{name}.txt").read_text()), process)


@pytest.mark.parametrize(
    ("name", "process", "kind", "call", "place"),
    [
        ("all_reduce", ASLEEP, "collective", "all_reduce", "all_reduce (torch/distributed/distributed_c10d.py:3252)"),
        ("skipped", ASLEEP, "collective", "barrier", "barrier (torch/distributed/distributed_c10d.py:5356)"),
        (
            "data_loader",
            SeenProcess("S", "poll"),
            "data_loader",
            "",
            "_try_get_data (torch/utils/data/dataloader.py:1291)",
        ),
        ("lock", ASLEEP, "lock", "", "deadlock (/home/me/train.py:47)"),
        ("py_spy_lock", ASLEEP, "lock", "", "deadlock (/home/me/wait.py:5)"),
        ("loop", SeenProcess("R"), "code", "", "compute_for_ever (/home/me/train.py:53)"),
        ("file", SeenProcess("S", "openat", "/data/pipe"), "file", "", "read_the_pipe (/home/me/train.py:59)"),
        ("file", SeenProcess("D", "read", "/nfs/a"), "blocked", "", "read_the_pipe (/home/me/train.py:59)"),
        ("loop", SeenProcess("T"), "stopped", "", "compute_for_ever (/home/me/train.py:53)"),
    ],
)
def test_a_recorded_stack_shows_where_its_rank_stands(
    name: str, process: SeenProcess, kind: str, call: str, place: str
) -> None:
    found = recorded(name, process)
    assert (found.rank, found.kind, found.call, found.place) == (2, kind, call, place)
    assert found.process == str(process) and place in found.stack


def test_the_jobs_own_line_is_told_beside_torchs() -> None:
    assert recorded("all_reduce", ASLEEP).caller == "main (/home/me/train.py:97)"
    assert recorded("data_loader", ASLEEP).caller == "batches (/home/me/train.py:81)"
    assert recorded("lock", ASLEEP).caller == ""  # it is the place itself


def frames(*calls: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(function, file, 7) for function, file in calls)


TRAIN = ("main", f"{HOME}/train.py")


@pytest.mark.parametrize(
    ("stack", "process", "kind", "call"),
    [
        # torch/autograd/graph.py of torch 2.13: DDP reduces gradients within backward
        (
            [("_engine_run_backward", f"{TORCH}/autograd/graph.py"), ("backward", f"{TORCH}/_tensor.py"), TRAIN],
            ASLEEP,
            "collective",
            "backward",
        ),
        (
            [("_engine_run_backward", f"{TORCH}/autograd/graph.py"), ("backward", f"{TORCH}/_tensor.py"), TRAIN],
            SeenProcess("R"),
            "code",
            "",
        ),
        # the model's own code runs below FSDP's forward: it is in no collective
        (
            [
                ("forward", f"{HOME}/model.py"),
                ("_call_impl", f"{TORCH}/nn/modules/module.py"),
                ("forward", f"{TORCH}/distributed/fsdp/fully_sharded_data_parallel.py"),
                TRAIN,
            ],
            SeenProcess("R"),
            "code",
            "",
        ),
        (
            [
                ("__getitem__", f"{HOME}/data.py"),
                ("fetch", f"{TORCH}/utils/data/_utils/fetch.py"),
                ("__next__", f"{TORCH}/utils/data/dataloader.py"),
                TRAIN,
            ],
            SeenProcess("S", "read", "/data/1.tar"),
            "data_loader",
            "",
        ),
        (
            [
                ("<module>", f"{TORCH}/utils/data/dataloader.py"),
                ("_find_and_load", "<frozen importlib._bootstrap>"),
                TRAIN,
            ],
            SeenProcess("R"),
            "code",
            "",
        ),
        (
            [("write", f"{TORCH}/serialization.py"), ("save", f"{TORCH}/serialization.py"), TRAIN],
            SeenProcess("S", "write", "/nfs/a"),
            "checkpoint",
            "",
        ),
        (
            [("wait", "/usr/lib/python3.12/threading.py"), ("get", "/usr/lib/python3.12/queue.py"), TRAIN],
            SeenProcess("S", "call 999"),
            "lock",
            "",
        ),
        ([("validate", f"{HOME}/train.py"), TRAIN], SeenProcess("R"), "evaluation", ""),
        (
            [("recv_into", "/usr/lib/python3.12/socket.py"), TRAIN],
            SeenProcess("S", "recvfrom", "socket:[7]"),
            "network",
            "",
        ),
        ([("read", f"{HOME}/train.py"), TRAIN], SeenProcess("S", "read", "socket:[7]"), "network", ""),
        ([("_wait", "/usr/lib/python3.12/subprocess.py"), TRAIN], SeenProcess("S", "wait4"), "process", ""),
        ([TRAIN], SeenProcess("S", "clock_nanosleep"), "sleep", ""),
        ([], SeenProcess("S", "futex"), "lock", ""),
        ([], SeenProcess("S"), "unknown", ""),
    ],
)
def test_other_stacks(stack: list[tuple[str, str]], process: SeenProcess, kind: str, call: str) -> None:
    found = stand_of(0, frames(*stack), process)
    assert (found.kind, found.call) == (kind, call)


def test_dumps_that_do_not_have_the_main_thread() -> None:
    many = "".join(f'Thread 0x{n:016x} (most recent call first):\n  File "a.py", line 1 in f\n\n' for n in range(100))
    assert main_thread(many + "...\n") == ()
    assert main_thread(many)[0] == Frame("f", "a.py", 1)
    assert main_thread('Stack (most recent call first):\n  File "a.py", line 1 in f\n')[0] == Frame("f", "a.py", 1)
    assert main_thread("") == main_thread("nothing of the kind") == ()


def test_long_stacks_are_cut() -> None:
    deep = frames(*[(f"f{n}", "/" + "d" * 900 + "/a.py") for n in range(90)])
    found = stand_of(0, deep, ASLEEP, note="n" * 900)
    assert len(found.stack) == MAX_STACK_CHARS and len(found.place) == len(found.note) == 400


# --- real processes ---------------------------------------------------------------------------------------------------

ANSWERS = """
import sys, signal, threading
from flyball.sdk.stack_file import answer_stack_requests, DUMP_SIGNAL
answer_stack_requests(sys.argv[1])
"""
OTHER_PROGRAM = "print('ready', flush=True); import time; time.sleep(3600)"
HANGS = {
    "lock": "lock = threading.Lock(); lock.acquire(); print('ready', flush=True); lock.acquire()",
    "loop": "print('ready', flush=True)\nwhile True: pass",
    "file": "import os; p = sys.argv[1] + '.pipe'; os.mkfifo(p); print('ready', flush=True); open(p).read()",
    "stopped": "import os; print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[Callable[..., StackSource]]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, rank: int = 0, environment: dict[str, str] | None = None) -> StackSource:
        beacon = str(tmp_path / f"beacon{rank}")
        process = subprocess.Popen(
            [sys.executable, "-c", code, beacon],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        stat = read_stat(process.pid)
        assert stat is not None
        return StackSource(rank, process.pid, stat.start_ticks, beacon)

    yield start
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)


def until_stands(source: StackSource, kind: str) -> RankStand:
    """It may not be in its call yet, or have had no processor just now."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        (found,) = asyncio.run(take_stands([source], DEADLINE_S, WorkerReads()))
        if found.kind == kind:
            return found
        assert time.monotonic() < deadline_s, found


@pytest.fixture(autouse=True)
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)


@pytest.mark.processes
@pytest.mark.parametrize(("way", "kind"), [("lock", "lock"), ("loop", "code"), ("file", "file")])
def test_the_stack_of_a_process_that_hangs_is_taken(hang: Callable[..., StackSource], way: str, kind: str) -> None:
    source = hang(ANSWERS + HANGS[way])
    found = until_stands(source, kind)
    assert found.place.startswith("<module> (<string>:") and found.note == ""
    if way == "file":
        assert found.process == f"in openat of {source.beacon}.pipe"
    again = until_stands(source, kind)
    assert again.stack.count("\n") == found.stack.count("\n")  # only the new dump was read


@pytest.mark.processes
def test_only_the_main_thread_answers_however_many_others_there_are(hang: Callable[..., StackSource]) -> None:
    others = "for _ in range(110): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    source = hang(ANSWERS + others + HANGS["lock"])
    assert until_stands(source, "lock").place.startswith("<module> (<string>:")
    written = Path(source.beacon + STACKS_SUFFIX).read_text()
    assert "Stack (most recent call first):" in written and "Thread 0x" not in written


@pytest.mark.processes
def test_a_stopped_process_and_one_that_ended(hang: Callable[..., StackSource]) -> None:
    stopped = hang(ANSWERS + HANGS["stopped"])
    found = until_stands(stopped, "stopped")
    assert (found.stack, found.note) == ("", "no stack: the process cannot answer")
    gone = StackSource(1, 2**22 - 1, 0, stopped.beacon)
    assert asyncio.run(take_stands([gone], 1.0, WorkerReads())) == ()


@pytest.mark.processes
def test_a_file_of_answers_does_not_grow_for_ever(hang: Callable[..., StackSource]) -> None:
    source = hang(ANSWERS + HANGS["lock"])
    answers = Path(source.beacon + STACKS_SUFFIX)
    answers.write_bytes(bytes(2 * stacks.MAX_DUMP_BYTES))
    (found,) = asyncio.run(take_stands([source], DEADLINE_S, WorkerReads()))
    assert found.stack, found
    assert answers.stat().st_size < stacks.MAX_DUMP_BYTES


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [
        "import sys, threading\n" + HANGS["lock"],  # never registered: the signal would end it
        ANSWERS.replace("\nanswer_stack", "\nsignal.signal(DUMP_SIGNAL, lambda *_: None); answer_stack")
        + HANGS["lock"],
        # another thread would take it
        ANSWERS + "signal.pthread_sigmask(signal.SIG_BLOCK, [DUMP_SIGNAL]); " + HANGS["lock"],
        ANSWERS + f"import os; os.execv(sys.executable, [sys.executable, '-c', {OTHER_PROGRAM!r}])",
    ],
)
def test_a_process_that_does_not_answer_gets_no_signal(hang: Callable[..., StackSource], code: str) -> None:
    source = hang(code)
    assert not answers_requests(source.pid, Path(source.beacon + STACKS_SUFFIX))
    (found,) = asyncio.run(take_stands([source], DEADLINE_S, WorkerReads()))
    assert (found.stack, found.note) == ("", "no stack: the process answers no request for it")
    assert read_stat(source.pid) is not None


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a program in py-spy's place; returns the file that gets its pid."""

    def install(then: str) -> Path:
        program, pid_file = tmp_path / "py-spy", tmp_path / "pid"
        program.write_text(f"#!/bin/sh\necho $$ > {pid_file}.new && mv {pid_file}.new {pid_file}\n{then}\n")
        program.chmod(0o700)
        monkeypatch.setattr("shutil.which", lambda name: str(program))
        return pid_file

    return install


def until_ended(pid: int) -> None:
    until(lambda: (stat := read_stat(pid)) is None or stat.state in "ZX", timeout_s=DEADLINE_S)


@pytest.mark.processes
def test_the_worker_is_asked_if_py_spy_does_not_answer(
    hang: Callable[..., StackSource], py_spy: Callable[[str], Path]
) -> None:
    source, pid_file = hang(ANSWERS + HANGS["lock"]), py_spy("exec sleep 3600")
    timeout_s = 1.0
    while True:
        (found,) = asyncio.run(take_stands([source], timeout_s, WorkerReads()))
        if found.stack and pid_file.exists():
            break
        timeout_s *= 2.0  # a busy machine may need longer
        assert timeout_s < DEADLINE_S, found
    assert found.place.startswith("<module> (<string>:") and found.note == ""
    until_ended(int(pid_file.read_text()))


@pytest.mark.processes
def test_py_spy_ends_with_the_command_that_is_given_up(
    hang: Callable[..., StackSource], py_spy: Callable[[str], Path]
) -> None:
    source, pid_file = hang(ANSWERS + HANGS["lock"]), py_spy("exec sleep 3600")

    async def give_up() -> None:
        taking = asyncio.create_task(take_stands([source], 4.0 * DEADLINE_S, WorkerReads()))
        async with asyncio.timeout(DEADLINE_S):
            while not pid_file.exists():
                await asyncio.sleep(0.01)
        taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()

    asyncio.run(give_up())
    until_ended(int(pid_file.read_text()))


@pytest.mark.processes
@pytest.mark.parametrize("exit_code", [0, 1])
def test_py_spys_stack_counts_whatever_its_exit_code(
    hang: Callable[..., StackSource], py_spy: Callable[[str], Path], exit_code: int
) -> None:
    """The daemon's Reaper may have taken the code."""
    py_spy(f"cat {STACKS}/py_spy_lock.txt; exit {exit_code}")
    (found,) = asyncio.run(take_stands([hang(ANSWERS + HANGS["lock"])], DEADLINE_S, WorkerReads()))
    assert (found.place, found.note) == ("deadlock (/home/me/wait.py:5)", "")


@pytest.mark.processes
def test_a_process_that_cannot_be_read_holds_up_neither_the_others_nor_the_end(
    hang: Callable[..., StackSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose open files are on a file system that hangs."""
    one, other = (hang(ANSWERS + HANGS["lock"], rank=rank) for rank in range(2))
    answers, free = stacks.answers_requests, threading.Event()
    monkeypatch.setattr(stacks, "READ_WITHIN_S", 0.3)
    monkeypatch.setattr(
        stacks,
        "answers_requests",
        lambda pid, path: free.wait(DEADLINE_S) if pid == one.pid else answers(pid, path),
    )
    reads = WorkerReads(2)
    stuck, found = asyncio.run(take_stands([one, other], DEADLINE_S, reads))
    assert (stuck.stack, stuck.note) == ("", "no stack: the process is not readable")
    assert found.stack
    assert not free.is_set()
    free.set()


@pytest.mark.processes
def test_the_flight_recorder_is_triggered_where_it_is_on(hang: Callable[..., StackSource], tmp_path: Path) -> None:
    """The pipe stands for torch's own: no NCCL runs here."""
    stem = f"{tmp_path}/recorder"
    waits = "print('ready', flush=True); import signal; signal.pause()"
    on = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem, "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    os.mkfifo(f"{stem}3.pipe")
    reader = os.open(f"{stem}3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        source = hang(waits, environment=on)
        assert trigger_flight_recorder(source.pid, 3) == "NCCL flight recorder: /tmp/nccl_trace_rank_3"
        assert os.read(reader, 10) == b"1\n"
        assert trigger_flight_recorder(source.pid, 4) == ""  # torch made no pipe for it
        off = hang(waits, environment=on | {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"})
        assert trigger_flight_recorder(off.pid, 3) == ""
        elsewhere = hang(waits, environment=on | {"TORCH_FR_DUMP_TEMP_FILE": "/scratch/fr_"})
        assert trigger_flight_recorder(elsewhere.pid, 3) == "NCCL flight recorder: /scratch/fr_3"
        Path(f"{stem}5.pipe").symlink_to(f"{stem}3.pipe")
        Path(f"{stem}6.pipe").write_text("")
        os.read(reader, 10)
        assert [trigger_flight_recorder(source.pid, rank) for rank in (5, 6)] == ["", ""]
        assert os.read(reader, 10) == b""
        assert Path(f"{stem}6.pipe").read_text() == ""
    finally:
        os.close(reader)
