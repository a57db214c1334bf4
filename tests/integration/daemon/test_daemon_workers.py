"""Workers: started from the warm spawner, their ends seen as events with the true status, stopped completely."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from support.clocks.waits import until
from support.commands.own_processes import is_running

from flyball.contracts.decisions import StartWorkers, UpdateState, WarmUp
from flyball.contracts.reports.signals import WorkerStartFailed

PRINT_ENVIRONMENT = """
import json, os, sys, torch
print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
                  "threads": torch.get_num_threads(), "main": sys.modules["__main__"].__file__,
                  "ids": [os.getsid(0), os.getpgid(0), os.getpid()]}), flush=True)
"""

WAIT = """
import signal
print("up", flush=True)
while True:
    signal.pause()
"""


def test_a_worker_has_torchruns_environment(shared, make_shared_job):
    job = make_shared_job(PRINT_ENVIRONMENT, nproc=2, argv=("train.py", "--lr", "3e-4"), env={"COLOUR": "blue"})
    pids = job.start().result.pids
    seen = {}
    for rank in (0, 1):
        assert job.exit_of(rank).exit_code == 0
        seen[rank] = json.loads(job.log(1, rank))
        assert seen[rank]["ids"] == [pids[str(rank)]] * 3
    found = seen[1]
    assert found["argv"] == ["train.py", "--lr", "3e-4"]
    assert found["cwd"] == found["path"] == str(job.workdir)
    assert found["main"] == str(job.workdir / "train.py")
    assert found["threads"] == 1
    expected = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": job.spec.job, "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "COLOUR": "blue", "FLYBALL_JOB": job.spec.job, "FLYBALL_GENERATION": "1", "FLYBALL_HOST_ID": "host-a",
        "FLYBALL_RESTORE_STEP": "",
    }  # fmt: skip
    assert {name: found["env"].get(name) for name in expected} == expected
    assert int(found["env"]["MASTER_PORT"]) > 0


def test_thread_counts_of_the_jobs_environment_hold_in_preloaded_workers(shared, make_shared_job):
    counts = {}
    for threads in ("1", "2"):
        job = make_shared_job(PRINT_ENVIRONMENT, env={"OMP_NUM_THREADS": threads})
        job.start()
        job.exit_of(0)
        counts[threads] = json.loads(job.log())["threads"]
    assert counts == {"1": 1, "2": min(2, os.cpu_count() or 1)}


def test_an_exit_is_an_event_and_does_not_wait_for_the_next_report(daemon, supervisor, make_job):
    daemon.start("--report-interval-s", "60")
    job = make_job(WAIT)
    pid = job.start().result.pids["0"]
    job.wait_up()
    os.kill(pid, signal.SIGKILL)
    exited = job.exit_of(0)
    assert (exited.pid, exited.exit_code, exited.signal_number) == (pid, None, signal.SIGKILL)
    assert exited.last_step == -1 and exited.error is None and not exited.expected


def test_exit_codes_and_errors_are_the_scripts_own(shared, make_shared_job):
    cases = {
        "code": "import sys; sys.exit(7)",
        "text": "import sys; sys.exit('no data')",
        "error": "def load():\n    raise ValueError('bad shard')\nload()",
        "record": (
            "from torch.distributed.elastic.multiprocessing.errors import record\n"
            "@record\ndef main():\n    raise KeyError('gone')\nmain()"
        ),
        "native": "import os, sys; print(\"terminate called after throwing an instance of 'c10::Error'\\n"
        '  what():  watchdog", file=sys.stderr, flush=True); os.abort()',
        "syntax": "def broken(:\n    pass",
        "ours": (
            "from flyball.contracts.errors import MemoryTooSmall\n"
            "raise MemoryTooSmall('No room for the slots.', hint='enlarge it')"
        ),
    }
    jobs, exits = {}, {}
    for name, script in cases.items():
        jobs[name] = make_shared_job(script)
        jobs[name].start()
        exits[name] = jobs[name].exit_of(0)
    assert exits["code"].exit_code == 7
    assert exits["text"].exit_code == 1
    assert "no data" in jobs["text"].log()
    error = exits["error"].error
    assert (error.kind, error.message) == ("ValueError", "bad shard")
    assert "in load" in error.traceback and "host_daemon" not in error.traceback
    assert "host_daemon" not in jobs["error"].log()
    assert exits["record"].error.kind == "KeyError"
    assert exits["native"].signal_number == signal.SIGABRT
    assert (exits["native"].error.kind, exits["native"].error.message) == ("Error", "watchdog")
    assert exits["syntax"].error.kind == "SyntaxError"
    assert exits["ours"].error.kind == "MemoryTooSmall"
    assert "No room for the slots. Next step: enlarge it" in jobs["ours"].log()
    assert "Traceback" not in jobs["ours"].log()


def test_stop_ends_the_whole_session(shared, make_shared_job):
    script = """
import os, signal, subprocess, sys
stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); signal.pause()"
a = subprocess.Popen([sys.executable, "-c", stubborn])
b = subprocess.Popen([sys.executable, "-c", stubborn], process_group=0)
print("pids", a.pid, b.pid, flush=True)
while True:
    signal.pause()
"""
    job = make_shared_job(script)
    worker = job.start().result.pids["0"]
    until(lambda: job.log(1, 0).split().count("child") == 2, "both children")
    found = until(lambda: re.search(r"pids (\d+) (\d+)\n", job.log(1, 0)), "their pids")  # these may come last
    children = [int(pid) for pid in found.groups()]
    update = job.stop()
    assert update.state is UpdateState.SUCCEEDED
    assert not any(is_running(pid) for pid in (worker, *children))
    assert job.exit_of(0).expected


def test_children_that_outlive_a_worker_are_ended_with_its_generation(shared, make_shared_job):
    script = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
raise RuntimeError("gone, and the child stays")
"""
    job = make_shared_job(script)
    job.start()
    job.exit_of(0)
    child = int(job.log(1, 0).split()[0])
    assert is_running(child)
    job.stop()
    assert not is_running(child)


MOVES_AWAY = """
import os, subprocess, sys, signal, time
quiet = "import signal, sys; print('child', flush=True); signal.pause()"
own_session = subprocess.Popen([sys.executable, "-c", quiet], start_new_session=True)
shell = f"setsid {sys.executable} -c \\"{quiet}\\" > /dev/null & echo $!"
orphan = int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, text=True).stdout.split()[0])
read, write = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.write(write, str(os.getpid()).encode())
        signal.pause()
    os._exit(0)
forked = int(os.read(read, 16))
print("pids", own_session.pid, orphan, forked, flush=True)
"""


@pytest.mark.parametrize("end", ["while True: signal.pause()", "raise RuntimeError('gone')"], ids=["runs", "failed"])
def test_processes_in_sessions_of_their_own_end_with_their_rank(shared, make_shared_job, end):
    """Also those whose parent has ended, and those that were only forked."""
    job = make_shared_job(MOVES_AWAY + end + "\n")
    job.start()
    found = until(lambda: re.search(r"pids (\d+) (\d+) (\d+)\n", job.log(1, 0)), "their pids")
    if "raise" in end:
        job.exit_of(0)
    pids = [int(pid) for pid in found.groups()]
    assert all(map(is_running, pids))
    assert job.stop().state is UpdateState.SUCCEEDED
    assert not any(map(is_running, pids))


def test_grace_lets_a_worker_finish_and_its_end_is_final(shared, make_shared_job):
    finishes = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # an early one stays pending
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
print("finished", flush=True)
"""
    stays = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n"
    willing, stubborn = make_shared_job(finishes), make_shared_job(stays + "while True:\n    signal.pause()\n")
    for job in (willing, stubborn):
        job.start()
        job.wait_up()
    assert willing.stop(grace_s=60.0).state is UpdateState.SUCCEEDED
    assert "finished" in willing.log()
    assert willing.exit_of(0).exit_code == 0
    assert stubborn.stop(grace_s=0.1).state is UpdateState.SUCCEEDED
    assert stubborn.exit_of(0).signal_number == signal.SIGKILL


def test_a_stopped_process_can_be_stopped(shared, make_shared_job):
    job = make_shared_job(WAIT)
    pid = job.start().result.pids["0"]
    job.wait_up()
    os.kill(pid, signal.SIGSTOP)
    assert job.stop().state is UpdateState.SUCCEEDED
    assert not is_running(pid)


def test_workers_survive_their_spawner(daemon, supervisor, make_job):
    daemon.start()
    script = "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\nprint('up', flush=True)\n"
    job = make_job(script + "signal.sigwait([signal.SIGUSR1])\nsys.exit(5)\n")
    worker = job.start().result.pids["0"]
    job.wait_up()
    (spawner,) = daemon.children("host_daemon.spawning.spawner")
    before = set(daemon.owned())
    os.kill(spawner, signal.SIGKILL)
    until(lambda: daemon.children("host_daemon.spawning.spawner") - before, "another spawner")
    assert is_running(worker)
    os.kill(worker, signal.SIGUSR1)
    assert job.exit_of(0).exit_code == 5
    job.stop(1)
    job.start(2)
    job.wait_up(2)


def test_a_failure_is_reported_correctly_while_the_spawner_is_stopped(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(WAIT, nproc=2)
    pids = job.start().result.pids
    for rank in (0, 1):
        job.wait_up(1, rank)
    (spawner,) = daemon.children("host_daemon.spawning.spawner")
    os.kill(spawner, signal.SIGSTOP)
    try:
        os.kill(pids["0"], signal.SIGKILL)
        assert job.exit_of(0).signal_number == signal.SIGKILL
    finally:
        os.kill(spawner, signal.SIGCONT)
    assert is_running(pids["1"])


def test_user_packages_with_our_names_take_precedence(shared, make_shared_job):
    names = ("services", "goodput", "simulator", "host_daemon")
    job = make_shared_job(f"import {', '.join(names)}\nprint([m.MINE for m in ({', '.join(names)})], flush=True)")
    for name in names:
        (job.workdir / name).mkdir()
        (job.workdir / name / "__init__.py").write_text(f"MINE = '{name}'")
    job.start()
    assert job.exit_of(0).exit_code == 0, job.log(1, 0)
    assert job.log(1, 0).strip() == str(list(names))


def test_a_module_runs_as_under_python_m(shared, make_shared_job):
    job = make_shared_job("", argv=("pack.train", "--x"), module=True)
    (job.workdir / "pack").mkdir()
    (job.workdir / "pack" / "__init__.py").write_text("")
    (job.workdir / "pack" / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])")
    job.start()
    assert job.exit_of(0).exit_code == 0
    assert job.log(1, 0).split() == ["__main__", "pack", "['--x']"]


def test_exit_handlers_of_a_script_run(shared, make_shared_job):
    script = """
import atexit, sys, threading
x = 5
atexit.register(lambda: print("atexit", sys.modules["__main__"].x))
threading.Thread(target=lambda: print("thread")).start()
"""
    job = make_shared_job(script)
    job.start()
    assert job.exit_of(0).exit_code == 0
    assert set(job.log(1, 0).split()) == {"thread", "atexit", "5"}


def test_ranks_do_not_share_random_numbers(shared, make_shared_job):
    job = make_shared_job("import numpy, random\nprint(numpy.random.rand(), random.random())", nproc=2)
    job.start()
    for rank in (0, 1):
        job.exit_of(rank)
    first, second = (job.log(1, rank).split() for rank in (0, 1))
    assert first[0] != second[0] and first[1] != second[1]


def test_an_environment_that_starts_threads_gets_a_cold_start(shared, make_shared_job):
    folder = shared.root / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    script = "import os, sys\nprint(os.getpid(), os.getsid(0))\nsys.exit(3)"
    job = make_shared_job(script, env={"PYTHONPATH": str(folder)})
    pid = job.start().result.pids["0"]
    assert job.exit_of(0).exit_code == 3
    assert job.log(1, 0).split() == [str(pid)] * 2
    assert "cold_starts" in shared.log()


def test_a_missing_script_is_a_clear_failure(shared, make_shared_job):
    job = make_shared_job("", argv=("absent.py",))
    command = job.command(StartWorkers(job.spec, job.placement(1)), generation=1)
    shared.supervisor.send(command)
    update = shared.supervisor.answer(command)
    assert (update.state, update.code) == (UpdateState.FAILED, "not_found")
    assert "absent.py does not exist" in update.message

    def failures() -> list[str]:
        bodies = [s.body for s in shared.supervisor.signals() if isinstance(s.body, WorkerStartFailed)]
        return [body.message for body in bodies if body.job == job.spec.job]

    (failed,) = until(failures, "the signal")
    assert "absent.py" in failed


def test_warm_up_starts_a_standby_before_there_is_a_worker(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(WAIT)
    assert job.send(WarmUp(job.spec), generation=1).state is UpdateState.SUCCEEDED
    (warm,) = daemon.children("host_daemon.spawning.spawner")
    job.start(1)
    job.wait_up()
    assert daemon.children("host_daemon.spawning.spawner") == {warm}
    job.end(1)
    until(lambda: not is_running(warm), "the standby's end")


def test_ranks_connect_at_once_and_again_after_a_restart(shared, make_shared_job):
    script = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print("up", int(x), os.environ["MASTER_PORT"], flush=True)
while True:
    signal.pause()
"""
    job = make_shared_job(script, nproc=2)
    job.start(1)
    for rank in (0, 1):
        job.wait_up(1, rank)
    port = job.stop(1).result.free_port
    job.start(2, port=port)
    for rank in (0, 1):
        job.wait_up(2, rank)
        assert f"up 2 {port}" in job.log(2, rank).splitlines()


def test_nothing_is_left_after_the_end_of_a_job_and_of_the_daemon(daemon, supervisor, make_job):
    daemon.start()
    ended, running = make_job(WAIT, name="ended"), make_job(WAIT, name="running")
    ended.start()
    running.start()
    until(lambda: all(daemon.rank_log(1, 0, name) for name in ("ended", "running")), "both up")
    assert ended.end().state is UpdateState.SUCCEEDED
    assert not [p.name for p in daemon.shm_dir.iterdir() if ".ended." in p.name]
    assert daemon.stop() == 0
    until(lambda: not daemon.owned(), "the end of all its processes")
