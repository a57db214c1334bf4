"""What survives a kill -9 of the daemon or its engine, and an absent supervisor."""

from __future__ import annotations

import json
import os
import signal

import msgspec
import pytest
from support.clocks.waits import until
from support.commands.own_processes import is_running

from flyball.contracts.cluster import Phase, RankStatus
from flyball.contracts.decisions import StartWorkers, StopWorkers, UpdateState
from flyball.contracts.reports.rank_columns import statuses_in, steps_in
from flyball.contracts.reports.signals import EngineRestarted, PreemptionNotice, Report, WorkerExited

WAIT = """
import signal
print("up", flush=True)
while True:
    signal.pause()
"""

STEPS = """
import os, signal
from flyball.sdk.beacon import BeaconWriter
beacon = BeaconWriter(os.environ["FLYBALL_BEACON"])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # an early one stays pending
print("up", flush=True)
for step in range(1_000):
    signal.sigwait([signal.SIGUSR1])
    beacon.step(step)
    print("done", step + 1, flush=True)
"""


def advance(daemon, supervisor, pid: int, upto: int) -> None:
    """Make the worker complete its steps up to one; the supervisor sees each before the next."""
    for step in range(upto + 1):
        if step not in steps_of(supervisor):
            os.kill(pid, signal.SIGUSR1)
            until(lambda step=step: step in steps_of(supervisor), f"step {step}")


def ranks_in(report: Report) -> list[RankStatus]:
    return list(statuses_in(report.workers, report.progress))


def steps_of(supervisor) -> list[int]:
    """Steps in the order in which they were reported. A report without a reply in time is sent again, so the same times
    of the same steps count once."""
    reported = [
        (run.first_step + i, at)
        for report in list(supervisor.reports)
        for run in steps_in(report.completed)
        for i, at in enumerate(run.completed_at)
    ]
    return [step for step, _ in dict.fromkeys(reported)]


def wait_until_all_has_arrived(daemon, supervisor) -> None:
    """Wait for a report without news: only then does the daemon know that its news arrived, and not repeat it."""

    def has_no_news() -> bool:
        incarnation = supervisor.newest.incarnation
        ours = [r for r in supervisor.reports if r.incarnation == incarnation]
        newest = max(ours, key=lambda report: report.seq)
        return not newest.signals and not newest.completed

    until(has_no_news, "a report without news")


def test_a_restarted_daemon_adopts_its_workers(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(STEPS)
    pid = job.start().result.pids["0"]
    job.wait_up()
    advance(daemon, supervisor, pid, 2)
    engine = until(lambda: supervisor.newest.facts.engine_address, "the engine")
    wait_until_all_has_arrived(daemon, supervisor)
    before = supervisor.newest.incarnation
    daemon.kill()
    assert is_running(pid)
    os.kill(pid, signal.SIGUSR1)  # a step while there is no daemon
    daemon.start()
    assert supervisor.newest.succeeds == (before,), "so that it can take over at once"
    until(lambda: [r for r in ranks_in(supervisor.newest) if r.pid == pid], "the worker in a report")
    until(lambda: 3 in steps_of(supervisor), "the step in between")
    advance(daemon, supervisor, pid, 4)
    assert steps_of(supervisor) == [0, 1, 2, 3, 4]
    assert until(lambda: supervisor.newest.facts.engine_address, "the engine") == engine
    update = job.stop()
    assert [(p.rank, p.step) for p in update.result.positions] == [(0, 4)]
    assert not is_running(pid)
    exited = supervisor.exit_of(0)
    assert (exited.exit_code, exited.signal_number, exited.expected, exited.last_step) == (None, None, True, 4)


def test_a_daemon_whose_host_id_another_one_uses_ends_its_workers_and_reports_why(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(WAIT)
    pid = job.start().result.pids["0"]
    job.wait_up()
    problem = {"code": "daemon_superseded", "detail": "Another daemon speaks for it.", "hint": "Give it another id."}
    supervisor.refusal_body = json.dumps(problem).encode()
    supervisor.refusal = (409, {})
    assert daemon.process.wait(60.0) != 0
    assert not is_running(pid)
    assert "error: Another daemon speaks for it.\nNext step: Give it another id.\n" in daemon.log()
    until(lambda: not daemon.owned(), "the end of all its processes")


def test_a_worker_that_ended_without_a_daemon_is_reported_once(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(WAIT)
    pid = job.start().result.pids["0"]
    job.wait_up()
    daemon.kill()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid), "its end")
    daemon.start()
    assert supervisor.exit_of(0).signal_number is None
    daemon.kill()
    daemon.start()
    count = len(supervisor.reports)
    until(lambda: len(supervisor.reports) > count + 3, "more reports")
    assert len(supervisor.exits()) == 1


ENDS = """
import atexit, os, signal, sys, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
atexit.register(print, "its own last words")
print("up", flush=True)
signal.sigwait([signal.SIGUSR1])
if os.fork() == 0:
    sys.exit(0)
os.wait()
sys.exit({code})
"""


@pytest.mark.parametrize(("code", "reported"), [(0, 0), (3, None)])
def test_a_good_end_without_a_daemon_is_known(daemon, supervisor, make_job, code, reported):
    daemon.start()
    job = make_job(ENDS.format(code=code))
    pid = job.start().result.pids["0"]
    job.wait_up()
    daemon.kill()
    os.kill(pid, signal.SIGUSR1)
    until(lambda: not is_running(pid), "its end")
    daemon.start()
    exited = supervisor.exit_of(0)
    assert (exited.exit_code, exited.signal_number) == (reported, None)


def test_the_spool_survives_and_keeps_its_numbers(daemon, supervisor, make_job):
    supervisor.commits = False
    daemon.start()
    job = make_job("import sys; sys.exit(3)", nproc=2)
    job.start()
    before = until(lambda: len(supervisor.exits()) == 2 and supervisor.signals(), "both exits")
    daemon.kill()
    supervisor.refusal = (503, {})
    daemon.launch()
    refused = supervisor.refused
    until(lambda: supervisor.refused > refused, "an attempt")
    daemon.kill()
    supervisor.reports.clear()
    supervisor.refusal = None
    daemon.start()
    after = until(lambda: len(supervisor.exits()) == 2 and supervisor.signals(), "both exits again")
    assert after == before
    supervisor.commits = True
    until(lambda: supervisor.committed, "the commit")
    wait_until_all_has_arrived(daemon, supervisor)
    daemon.kill()
    earlier = {report.incarnation for report in supervisor.reports}
    daemon.start()

    def reports() -> list[Report]:
        return [r for r in list(supervisor.reports) if r.incarnation not in earlier]

    until(lambda: len(reports()) > 3, "reports of the new one")
    assert [s for report in reports() for s in report.signals] == []


def test_an_uncommitted_signal_is_sent_again(daemon, supervisor, make_job):
    supervisor.commits = False
    daemon.start()
    make_job("").start()

    def attempts() -> int:  # to send this end: a busy machine is a condition, which may be sent before it
        return sum(isinstance(s.body, WorkerExited) for report in supervisor.reports for s in report.signals)

    until(lambda: attempts() >= 3, "three attempts")
    assert len(supervisor.exits()) == 1, supervisor.signals()


def test_a_stale_command_is_refused_even_after_a_restart(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(WAIT)
    pid = job.start(2, epoch=5).result.pids["0"]
    job.wait_up(2)
    for epoch, generation in ((4, 9), (5, 1)):
        update = job.stop(generation, epoch=epoch)
        assert (update.state, update.code) == (UpdateState.REFUSED, "stale_command")
    daemon.kill()
    daemon.start()
    assert job.stop(9, epoch=4).state is UpdateState.REFUSED
    assert is_running(pid)


def test_a_repeated_command_is_answered_and_not_obeyed_again(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(WAIT)
    start = job.command(StartWorkers(job.spec, job.placement(1)), generation=1)
    supervisor.send(start)
    first = supervisor.answer(start)
    job.wait_up()
    supervisor.send(start)
    assert supervisor.answer(start, count=2) == first
    daemon.kill()
    daemon.start()
    supervisor.send(start)
    repeated = supervisor.answer(start, count=3)
    assert repeated.incarnation == supervisor.newest.incarnation, "the former daemon no longer counts"
    assert msgspec.structs.replace(repeated, incarnation=first.incarnation) == first
    assert is_running(first.result.pids["0"])
    assert supervisor.exits() == []


def test_a_dead_engine_is_replaced_while_workers_keep_running(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(WAIT)
    pid = job.start().result.pids["0"]
    job.wait_up()
    until(lambda: supervisor.newest.engine.alive, "the engine")  # an engine that was never up causes no signal
    (engine,) = [p for p, c in daemon.owned().items() if "ckpt_engine.host.server" in c]
    os.kill(engine, signal.SIGKILL)
    until(lambda: [s for s in supervisor.signals() if isinstance(s.body, EngineRestarted)], "the signal")
    until(lambda: supervisor.newest.engine.alive, "a report of the new engine")
    assert is_running(pid)
    assert [p for p, c in daemon.owned().items() if "ckpt_engine.host.server" in c] != [engine]
    assert job.stop().state is UpdateState.SUCCEEDED


def test_workers_keep_running_while_the_supervisor_is_away(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(STEPS)
    pid = job.start().result.pids["0"]
    job.wait_up()
    supervisor.refusal = (503, {})
    refused = supervisor.refused
    for count in (1, 2, 3):
        os.kill(pid, signal.SIGUSR1)
        until(lambda count=count: f"done {count}\n" in job.log(), "the step")  # two signals at once would merge
        until(lambda r=refused: supervisor.refused > r, "an attempt")
        refused = supervisor.refused
    supervisor.refusal = None
    until(lambda: len(steps_of(supervisor)) == 3, "all steps")
    assert steps_of(supervisor) == [0, 1, 2]


def test_a_busy_supervisor_is_left_alone_as_long_as_it_requests(daemon, supervisor):
    daemon.start()
    supervisor.refusal = (429, {"Retry-After": "30"})
    until(lambda: supervisor.refused >= 2, "both the report and the poll refused")
    refused = supervisor.refused
    count = len(supervisor.reports)
    os.kill(daemon.pid, 0)
    assert (supervisor.refused, len(supervisor.reports)) == (refused, count)


def test_a_wrong_token_is_logged_clearly_and_the_daemon_keeps_running(daemon, supervisor):
    daemon.token_file.write_text("wrong")
    daemon.launch()
    until(lambda: "supervisor_refuses" in daemon.log(), "the reason in the log")
    assert "refuses this daemon's token" in daemon.log() and "wrong" not in daemon.log().replace("wrong_", "")
    assert daemon.process.poll() is None


def test_a_preemption_notice_is_reported_once(daemon, supervisor):
    daemon.start("--report-interval-s", "60")
    notice = daemon.state_dir / "preemption-notice.json"

    def write(text: str) -> None:
        temporary = notice.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.rename(notice)

    def notices() -> list[PreemptionNotice]:
        return [s.body for s in supervisor.signals() if isinstance(s.body, PreemptionNotice)]

    write("{broken")
    until(lambda: "preemption_notice_malformed" in daemon.log(), "the complaint")
    write('{"deadline_s": 30.0, "source": "test"}')
    (notice_sent,) = until(notices, "the signal")
    assert notice_sent.source == "test"
    assert abs(notice_sent.deadline_at - notice.stat().st_mtime - 30) < 1e-3
    daemon.kill()
    daemon.start()
    count = len(supervisor.reports)
    until(lambda: len(supervisor.reports) > count + 3, "more reports")
    assert len(notices()) == 1
    assert daemon.log().count("preemption_notice_malformed") == 1


def test_an_interrupted_start_is_not_repeated(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(WAIT)
    hold = daemon.root / "hold"
    hold.mkdir()
    (hold / "sitecustomize.py").write_text("import signal\nsignal.pause()\n")
    held = make_job(WAIT, name="held", env={"PYTHONPATH": str(hold)})  # its standby is never ready
    command = held.command(StartWorkers(held.spec, held.placement(1)), generation=1)
    supervisor.send(command)
    until(lambda: daemon.children("host_daemon.spawning.spawner"), "the standby")
    until(lambda: command.command_id in daemon.log(), "the running command")
    daemon.kill()
    daemon.start()
    supervisor.send(command)
    update = supervisor.answer(command)
    assert (update.state, update.code) == (UpdateState.FAILED, "interrupted")
    job.start()
    job.wait_up()


def test_a_newer_command_replaces_one_that_waits(daemon, supervisor, make_job):
    daemon.start()
    hold = daemon.root / "hold"
    hold.mkdir()
    (hold / "sitecustomize.py").write_text("import signal\nsignal.pause()\n")
    job = make_job(WAIT, env={"PYTHONPATH": str(hold)})
    start = job.command(StartWorkers(job.spec, job.placement(1)), generation=1)
    supervisor.send(start)
    until(lambda: daemon.children("host_daemon.spawning.spawner"), "the standby")
    stop = job.command(StopWorkers("job", 1, 0.0), generation=1)
    supervisor.send(stop)
    assert supervisor.answer(start).code == "superseded"
    assert supervisor.answer(stop).state is UpdateState.SUCCEEDED
    assert supervisor.newest.workers == supervisor.newest.progress == ()


def test_beacons_show_phase_and_age(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(STEPS)
    pid = job.start().result.pids["0"]
    job.wait_up()
    advance(daemon, supervisor, pid, 1)
    status = until(lambda: [r for r in ranks_in(supervisor.newest) if r.step == 1], "step 1")[0]
    assert (status.rank, status.generation, status.pid, status.phase) == (0, 1, pid, Phase.STEP)
    older = until(lambda: [r for r in ranks_in(supervisor.newest) if r.beacon_age_s > 0.3], "an age")[0]
    assert older.step == 1
    marks = max((m for report in supervisor.reports for m in report.marks), key=lambda m: m.first_step_at)
    assert marks.first_step_at > marks.spawned_at > 0
