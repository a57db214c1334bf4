"""The daemon's smaller parts: environment of a rank, errors of a worker, notices, ports, settings, start checks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry, RestorePlan
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.credentials import host_credential
from flyball.contracts.errors import ConfigurationError, NotFound, StateVersionMismatch, StorageFull, UsageError
from host_daemon.kernel import free_ports
from host_daemon.kernel.free_ports import FreePorts, is_free
from host_daemon.kernel.kin import WorkerOrigin, kin_of
from host_daemon.kernel.processes import ExitStatus, is_alive, open_pidfd_of, read_stat, signal_pidfd
from host_daemon.link.cluster_clock import ClusterClock
from host_daemon.orders.generation_start import check_script
from host_daemon.probes.host_needs import check_host
from host_daemon.probes.notices.preemption import PreemptionProbe
from host_daemon.settings import parse_settings
from host_daemon.spawning.spawn_wire import StoreOrder
from host_daemon.spawning.spawner_client import SpawnError
from host_daemon.spawning.standby import Standbys
from host_daemon.store.database import HostDatabase
from host_daemon.store.state_dir import HostStateDir
from host_daemon.store.worker_records import WorkerRecord, WorkerRecords
from host_daemon.workers.worker_environment import COPY_PAST_CACHES, job_environment, rank_environment
from host_daemon.workers.worker_errors import MAX_LOG_LINES, SECONDARY_LOG_LINES, read_ending, read_error
from simulator.inject.processes import LiveProcess, send, wait_ended

SPEC = JobSpec("job", ("train.py",), "/code", nnodes=2, nproc_per_node=2, checkpoint=CheckpointSpec(every_steps=5))
HOSTS = (HostRanks("host-a", "10.0.0.1", "", (0, 1)), HostRanks("host-b", "10.0.0.2", "", (2, 3)))
PLACEMENT = Placement(
    job="job",
    generation=3,
    world_size=4,
    hosts=HOSTS,
    master_address="10.0.0.1",
    master_port=20_001,
    peers={},
    lineage=(LineageEntry(1, 7), LineageEntry(3)),
    restore=RestorePlan(7, {}),
    restart_count=2,
    run="20251120-104300-123",
)


def test_environment_of_a_rank_on_the_second_host():
    common = job_environment({"PATH": "/bin", "RANK": "9"}, SPEC)
    found = rank_environment(
        common,
        spec=SPEC,
        placement=PLACEMENT,
        host=HOSTS[1],
        local_rank=1,
        shm_prefix="/dev/shm/flyball-x",
        engine_notify="/s/notify.sock",
        error_file="/s/e.json",
    )
    expected = {
        "PATH": "/bin", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20001", "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_ERROR_FILE": "/s/e.json", "OMP_NUM_THREADS": "1", "FLYBALL_GENERATION": "3",
        "FLYBALL_BEACON": "/dev/shm/flyball-x.job.g3.r3.beacon", "FLYBALL_RESTORE_STEP": "7",
        "FLYBALL_ENGINE_NOTIFY": "/s/notify.sock", "FLYBALL_RUN": "20251120-104300-123",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert wire.decode(found["FLYBALL_CHECKPOINT"], CheckpointSpec) == SPEC.checkpoint
    assert msgspec.json.decode(found["FLYBALL_LINEAGE"], type=Lineage) == PLACEMENT.lineage


def test_the_users_own_variables_take_precedence():
    given = {"OMP_NUM_THREADS": "8", "RES_OPTIONS": "timeout:9", "GLIBC_TUNABLES": "glibc.malloc.check=1"}
    found = job_environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, msgspec.structs.replace(SPEC, env=given))
    assert {**found, **given, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"} == found
    assert job_environment({}, SPEC)["GLIBC_TUNABLES"] == COPY_PAST_CACHES
    alone = msgspec.structs.replace(SPEC, nproc_per_node=1)
    assert "OMP_NUM_THREADS" not in job_environment({}, alone)


FAILED, KILLED, ABORTED = ExitStatus(exit_code=1), ExitStatus(signal_number=9), ExitStatus(signal_number=6)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (
            {"message": {"message": "ValueError: no: good", "extraInfo": {"py_callstack": "T"}}},
            "ValueError",
            "no: good",
        ),
        ({"message": "torch.cuda.OutOfMemoryError: 3 GiB"}, "OutOfMemoryError", "3 GiB"),
        ({"message": {"message": "all is lost", "extraInfo": 7}}, "", "all is lost"),
        ({"message": {"message": "KeyboardInterrupt"}}, "KeyboardInterrupt", ""),
    ],
)
def test_torchs_error_file_takes_precedence(tmp_path, content, kind, message):
    (tmp_path / "error").write_text(json.dumps(content))
    (tmp_path / "log").write_text("Traceback (most recent call last):\nTypeError: another\n")
    error = read_error(tmp_path / "error", tmp_path / "log", FAILED)
    assert (error.kind, error.message) == (kind, message)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"message": 5}', b"\xff"])
def test_without_a_usable_error_file_the_log_is_read(tmp_path, content):
    (tmp_path / "error").write_bytes(content)
    log = "Traceback (most recent call last):\n  File a\nKeyError: 1\n\nDuring handling ...\n\n"
    log += "Traceback (most recent call last):\n  File b, line 2\n    boom()\nmy.lib.ShardError: bad 7\nbye\n"
    (tmp_path / "log").write_text(log)
    error = read_error(tmp_path / "error", tmp_path / "log", FAILED)
    assert (error.kind, error.message) == ("ShardError", "bad 7")
    assert error.traceback.startswith("Traceback") and error.traceback.endswith("bad 7")


def test_a_killed_worker_has_no_error_of_its_own(tmp_path):
    (tmp_path / "log").write_text("Traceback (most recent call last):\nKeyError: caught and logged\n")
    assert read_error(tmp_path / "error", tmp_path / "log", KILLED) is None
    assert read_error(tmp_path / "error", tmp_path / "log", ExitStatus(exit_code=0)) is None
    assert read_error(tmp_path / "error", tmp_path / "log", ABORTED).kind == "KeyError"
    assert read_error(tmp_path / "error", tmp_path / "absent", FAILED) is None


def test_the_last_lines_of_the_log_are_kept_within_bounds(tmp_path):
    log = tmp_path / "log"
    bar = b"\r".join(b"step %d" % step for step in range(9))
    log.write_bytes(b"early\n" * 50_000 + bar + b"\r\n\x1b[31mred\x1b[0m \x07bell\n\n" + b"\xff" * 9_000 + b"\nlast")
    ending = read_ending(tmp_path / "error", log, ExitStatus(exit_code=3))
    lines = ending.log_tail.split("\n")
    assert lines[-4:] == ["step 8", "red bell", "\ufffd" * 1_000, "last"] and len(lines) == MAX_LOG_LINES
    assert (ending.error, ending.error_class, ending.kernel) == (None, "exit_code", "")
    log.write_text("x" * 900 + "\n" + ("y" * 900 + "\n") * 30)
    assert len(read_ending(tmp_path / "error", log, KILLED).log_tail) == 4_096
    assert read_ending(tmp_path / "error", tmp_path / "none", KILLED).log_tail == ""


def test_torchs_own_traceback_is_understood_and_secondary_logs_are_short(tmp_path):
    log = "fine\n" * 40 + "[rank0]: Traceback (most recent call last):\n[rank0]:   File a\n"
    log += "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.\n"
    (tmp_path / "log").write_text(log)
    ending = read_ending(tmp_path / "error", tmp_path / "log", FAILED)
    assert ending.error is not None and ending.error.kind == "RuntimeError"
    assert ending.error_class == "connection_lost" and len(ending.log_tail.split("\n")) == SECONDARY_LOG_LINES


def test_each_version_of_a_notice_is_reported_once(tmp_path):
    path = tmp_path / "preemption-notice.json"

    def rename_into_place(text: str) -> float:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(path)
        return path.stat().st_mtime

    probe = PreemptionProbe(path, reported=None)
    assert probe.check() is None
    written_at = rename_into_place('{"deadline_s": 30, "source": "gce"}')
    notice = probe.check()
    assert (notice.deadline_at, notice.source) == (written_at + 30.0, "gce")
    assert probe.check() is None
    assert PreemptionProbe(path, reported=probe.identity).check() is None
    for malformed in ("", "{", '{"deadline_s": -1}', '{"source": "x"}', '{"deadline_s": "soon"}', "x" * 9_999):
        rename_into_place(malformed)
        assert probe.check() is None
    rename_into_place('{"deadline_s": 5}')
    assert probe.check() is not None


def test_a_proposed_port_is_free_and_outside_the_range_of_outgoing_connections(monkeypatch):
    ports, found_free = FreePorts(), set()

    def look(port: int) -> bool:
        free = is_free(port)  # right now: others on this machine take ports too
        found_free.update([port] if free else [])
        return free

    monkeypatch.setattr(free_ports, "is_free", look)
    proposed = [ports.find() for _ in range(20)]
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port in found_free and port < ephemeral for port in proposed)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not is_free(taken.getsockname()[1])


@pytest.mark.processes
def test_a_process_is_identified_by_pid_and_start_time_and_found_by_session():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        stat = read_stat(child.pid)
        assert stat.session == child.pid
        assert is_alive(child.pid, stat.start_ticks) and not is_alive(child.pid, stat.start_ticks + 1)
        origin = WorkerOrigin(child.pid, stat.start_ticks, "job", 0, 1)
        assert kin_of([origin], {}) == {child.pid: stat.start_ticks}
        assert kin_of([msgspec.structs.replace(origin, start_ticks=stat.start_ticks + 1)], {}) == {}
    finally:
        child.kill()
        child.communicate()
    assert read_stat(child.pid) is None and kin_of([origin], {child.pid: stat.start_ticks}) == {}
    assert ExitStatus.of_wait_status(signal.SIGKILL) == ExitStatus(signal_number=signal.SIGKILL)
    assert ExitStatus.of_wait_status(7 << 8) == ExitStatus(exit_code=7)


def test_a_missing_script_is_named(tmp_path):
    spec = msgspec.structs.replace(SPEC, workdir=str(tmp_path))
    with pytest.raises(NotFound, match=r"train\.py does not exist"):
        check_script(spec, {})
    check_script(msgspec.structs.replace(spec, module=True), {})
    with pytest.raises(NotFound, match="working folder"):
        check_script(msgspec.structs.replace(spec, workdir=str(tmp_path / "no")), {})


def arguments(tmp_path: Path, **changes: str) -> list[str]:
    (tmp_path / "token").write_text("secret\n")
    given = {
        "state-dir": str(tmp_path / "state"),
        "host-id": "host-a",
        "supervisor": "http://127.0.0.1:7070",
        "token-file": str(tmp_path / "token"),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return [part for name, value in given.items() for part in (f"--{name}", value)]


def test_flags_override_the_environment(tmp_path):
    environ = {"FLYBALL_ADDRESS": "10.1.1.1", "FLYBALL_FAILURE_DOMAIN": "rack-1", "FLYBALL_SHM_DIR": "/x"}
    settings = parse_settings(arguments(tmp_path, failure_domain="rack-2"), environ)
    assert (settings.address, settings.failure_domain, settings.shm_dir) == ("10.1.1.1", "rack-2", "/x")
    assert settings.credential == host_credential("secret", "host-a")
    assert "secret" not in repr(settings) and settings.credential.token not in repr(settings)


def test_several_servers(tmp_path):
    environ = {"FLYBALL_SUPERVISOR": "http://x:1", "FLYBALL_ACTUATOR_URLS": "http://c:1, http://d:1/,http://c:1"}
    both = ["--supervisor", "http://b:1/"]
    settings = parse_settings([*arguments(tmp_path, supervisor="http://a:1"), *both], environ)
    assert settings.sensor_urls == ("http://a:1", "http://b:1")
    assert settings.actuator_urls == ("http://c:1", "http://d:1")
    alone = parse_settings(arguments(tmp_path, supervisor="", sensor_urls="http://s:1"), environ)
    assert (alone.sensor_urls, alone.actuator_urls) == (("http://s:1",), ("http://c:1", "http://d:1"))


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"host_id": "Host A"}, UsageError, "Host A"),
        ({"supervisor": "localhost"}, UsageError, "localhost"),
        ({"supervisor": "http://a:1,b"}, UsageError, "b is no URL"),
        ({"supervisor": ""}, UsageError, "--supervisor is missing"),
        ({"supervisor": "", "sensor_urls": "http://a:1"}, UsageError, "--supervisor is missing"),
        ({"report_interval_s": "0"}, UsageError, "report-interval-s"),
        ({"report_interval_s": "soon"}, UsageError, "soon"),
        ({"state_dir": ""}, UsageError, "--state-dir"),
        ({"token_file": "/nowhere/token"}, ConfigurationError, "/nowhere/token"),
        ({"unknown": "1"}, UsageError, "nknown"),
    ],
)
def test_bad_settings_are_named_with_a_next_step(tmp_path, changes, error, word):
    with pytest.raises(error, match=word) as caught:
        parse_settings(arguments(tmp_path, **changes), {})
    assert caught.value.hint


def test_one_daemon_per_state_folder_and_only_of_its_version(tmp_path):
    first = HostStateDir(tmp_path / "state")
    first.open("host")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigurationError, match=str(os.getpid())):
        HostStateDir(tmp_path / "state").open("host")
    first.close()
    again = HostStateDir(tmp_path / "state")
    again.open("host")
    again.close()
    with pytest.raises(ConfigurationError, match="of host host, not of other") as refused:
        again.open("other")
    assert "--host-id host" in refused.value.hint
    again.open("host")
    again.close()
    (tmp_path / "state" / "VERSION").write_text("0\n")
    with pytest.raises(StateVersionMismatch, match="'0'"):
        HostStateDir(tmp_path / "state").open("host")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file"):
        HostStateDir(tmp_path / "file").open("host")


def test_what_the_host_lacks_is_reported_at_the_start(tmp_path):
    (tmp_path / "state").mkdir()
    environ = {"FLYBALL_SHM_DIR": str(tmp_path)}
    check_host(parse_settings(arguments(tmp_path), environ))
    with pytest.raises(ConfigurationError, match="not an address of this host"):
        check_host(parse_settings(arguments(tmp_path, address="192.0.2.7"), environ))
    with pytest.raises(ConfigurationError, match="not an IP address"):
        check_host(parse_settings(arguments(tmp_path, address="no.such.host"), environ))
    with pytest.raises(ConfigurationError, match="/nowhere"):
        check_host(parse_settings(arguments(tmp_path), {"FLYBALL_SHM_DIR": "/nowhere"}))


def test_on_a_full_disk_it_starts_only_if_there_may_be_workers_to_stop(tmp_path, monkeypatch, capsys):
    async def left(*, is_running: bool) -> None:
        database = HostDatabase(tmp_path / "state" / "daemon.sqlite")
        records = WorkerRecords(database)
        await records.add([WorkerRecord("job", 1, 0, 4711, 99, 5.0, "log")])
        if not is_running:
            await records.end(WorkerRecord("job", 1, 0, 4711, 99, 5.0, "log"))
        database.close()

    (tmp_path / "state").mkdir()
    settings = parse_settings(arguments(tmp_path), {"FLYBALL_SHM_DIR": "/dev/shm"})
    monkeypatch.setattr("host_daemon.probes.host_needs.MIN_DISK_BYTES", 1 << 60)
    with pytest.raises(StorageFull, match="the daemon needs"):
        check_host(settings)
    asyncio.run(left(is_running=True))
    check_host(settings)
    assert "may have to stop workers" in capsys.readouterr().err
    asyncio.run(left(is_running=False))
    with pytest.raises(StorageFull, match="the daemon needs"):
        check_host(settings)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "code"),
    [({"host_id": "A B"}, 2), ({"token_file": "/nowhere"}, 3), ({"address": "192.0.2.7"}, 3)],
)
def test_a_daemon_that_cannot_start_prints_the_cause_without_a_traceback(tmp_path, changes, code):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "host_daemon", *arguments(tmp_path, **changes)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.startswith("error: ") and "\nNext step: " in done.stderr
    assert "Traceback" not in done.stderr


def process_descriptors() -> set[str]:
    """This process's pidfds. Other descriptors may come and go with threads."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "pidfd" in str(path.readlink()):
                found.add(path.name)
    return found


@pytest.mark.processes
def test_a_pidfd_is_opened_only_for_the_right_process():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        open_before = process_descriptors()
        assert open_pidfd_of(process.pid, lambda: False) is None  # its pid now belongs to this one
        assert process_descriptors() <= open_before
        stat = read_stat(process.pid)
        descriptor = open_pidfd_of(process.pid, lambda: is_alive(process.pid, stat.start_ticks))
        assert descriptor is not None
        signal_pidfd(descriptor, signal.SIGKILL)
        assert process.wait(60.0) == -signal.SIGKILL
        signal_pidfd(descriptor, signal.SIGKILL)  # to nobody
        assert open_pidfd_of(process.pid, lambda: True) is None
        os.close(descriptor)
    finally:
        process.kill()
        process.wait(60.0)


def test_the_pid_of_a_process_that_is_gone_may_be_a_threads_by_now():
    """In a container, where pids are small, that happens at almost every restart."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(60.0,))
    thread.start()
    try:
        assert thread.native_id not in (None, os.getpid())
        assert open_pidfd_of(thread.native_id, lambda: True) is None
        assert not send(LiveProcess(thread.native_id, 0, 0, ()), signal.SIGKILL)
        assert wait_ended([LiveProcess(thread.native_id, 0, 0, ())], timeout_s=60.0, clock=SystemClock()) == []
    finally:
        ended.set()
        thread.join()


def test_a_host_without_descriptors_starts_cold_and_reports_why(tmp_path, monkeypatch):
    def exhausted(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def scenario():
        monkeypatch.setattr(socket, "socketpair", exhausted)  # only now: the loop needs a pair of its own
        standbys = Standbys(state_dir=tmp_path, log_path=tmp_path / "log", reaper=None, clock=SystemClock())
        standbys.keep("job", {})
        async with asyncio.timeout(120):
            assert "kept dying" in await standbys.ready("job")
            with pytest.raises(SpawnError, match="Too many open files"):
                await standbys.start("job", StoreOrder("job", "127.0.0.1", 1, str(tmp_path / "log")))
        await standbys.close()

    monkeypatch.setattr("host_daemon.spawning.standby.RESTART_DELAY_S", 0.0)
    asyncio.run(scenario())


class SetClock:
    """A host's clock that a test can set."""

    def __init__(self) -> None:
        self.wall, self.passed_s = 1_000.0, 0.0

    def go_on(self, seconds: float) -> None:
        self.wall += seconds
        self.passed_s += seconds

    def wall_s(self) -> float:
        return self.wall

    def monotonic_s(self) -> float:
        return self.passed_s


def test_setting_the_clock_back_does_not_date_a_report_before_the_last_one():
    clock = SetClock()
    cluster = ClusterClock(clock)
    times = []
    for second in range(100):
        clock.go_on(1.0)
        if second == 10:
            clock.wall -= 40.0
        times.append(cluster.wall_s())
    assert all(later > earlier for earlier, later in pairwise(times))
    assert times[49] == times[9] + 20.0 and times[99] == clock.wall, "at half the pace, until they meet"
    clock.wall += 500.0
    assert cluster.wall_s() == clock.wall
    cluster.follow(900.0)
    clock.go_on(1.0)
    assert cluster.wall_s() == 901.0
