"""Faults of the catalog on a host's folder: refused, injected, journalled, and undone, also by a later process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.clocks.waits import until

from flyball.cli.signals import EndSignals, Interrupted
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, FlyballError, Forbidden, NotFound, Unreachable, UsageError
from host_daemon.probes.gpus import RecordedNvml
from host_daemon.store.database import HostDatabase
from simulator.inject import injector as injector_module
from simulator.inject.agent import InjectionAgent
from simulator.inject.injector import FaultInjector, FaultRequest, undo_left
from simulator.inject.journal import Journal, JournalEntry
from simulator.inject.kinds import gpus
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.hosts import command_of
from simulator.inject.kinds.kind import FaultSite, Plan, RealFault

CLOCK = SystemClock()


class Api:
    """A supervisor with one job on one host."""

    def __init__(self, *, injectable: bool = True) -> None:
        self.spec = {"job": "gpt", "injectable": injectable}
        self.events: list[Any] = []
        self.is_away = False
        self.other_jobs: dict[str, Any] = {}

    def get(self, path: str, **query: str | int | None) -> Any:  # noqa: ANN401 - JSON
        job = {
            "job": "gpt",
            "state": "running",
            "spec": self.spec,
            "ranks": [{"rank": 0, "host_id": "host-a"}, {"rank": 1, "host_id": "host-a"}],
        }
        answers = {
            "/v1/jobs": {"items": [job]},
            "/v1/jobs/gpt": job,
            "/v1/hosts": {"items": [{"host_id": "host-a"}]},
            "/v1/hosts/host-a": {"host_id": "host-a", "daemon_pid": 0, "job": "gpt"},
        }
        if path == "/v1/jobs" and self.other_jobs:  # another page
            answers[path] = {"items": [], "next_before": "1"} if query.get("before") is None else self.other_jobs
        if path not in answers:
            raise NotFound(f"There is no {path}.", hint="look")
        return answers[path]

    def post(self, path: str, body: object = None) -> None:
        assert path == "/v1/events"
        if self.is_away:
            raise Unreachable("The supervisor is away.", hint="wait")
        self.events += msgspec.to_builtins(body)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "host-a"
    folder.mkdir()
    (folder / "VERSION").write_text("1\n")
    HostDatabase(folder / "daemon.sqlite").close()
    return folder


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "injections")


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def injector(api: Api, host: Path, journal: Journal) -> Iterator[FaultInjector]:
    with FaultInjector(api, clock=CLOCK, journal=journal, state_dir=host) as injector:
        yield injector


CONDITION = FaultRequest("condition", host_id="host-a", options={"kind": "ecc"}, lasts_s=600.0)


def test_a_fault_lasts_until_it_is_undone(injector: FaultInjector, api: Api, host: Path, journal: Journal) -> None:
    done = injector.inject(CONDITION)
    (said,) = (host / "conditions").iterdir()
    assert json.loads(said.read_text())["kind"] == "ecc" and said.stat().st_mode & 0o077 == 0
    assert injector.active == (done.injection_id,) and [e.fault for e in journal.entries()] == ["condition"]
    assert api.events[0]["kind"] == "fault_injected" and api.events[0]["job"] == "gpt"
    injector.undo(done.injection_id)
    injector.undo(done.injection_id)
    assert not said.exists() and not injector.active and not journal.entries()


def test_a_fault_is_undone_when_its_time_is_over(injector: FaultInjector, host: Path) -> None:
    injector.inject(msgspec.structs.replace(CONDITION, lasts_s=0.01))
    until(lambda: not injector.active)
    assert not list((host / "conditions").iterdir())


def test_a_fault_that_breaks_off_is_undone_at_once(
    injector: FaultInjector, host: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(_kind: RealFault, _plan: Plan, _over: threading.Event) -> None:
        raise OSError("the queue is gone")

    monkeypatch.setattr(type(KINDS["condition"]), "hold", hold)
    injector.inject(CONDITION)
    until(lambda: not injector.active)
    assert not list((host / "conditions").iterdir()) and not journal.entries() and not injector.active


def test_a_signal_breaks_off_an_injection_that_waits(
    injector: FaultInjector, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inject(_kind: RealFault, _plan: Plan) -> None:
        assert journal.entries()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60.0)

    monkeypatch.setattr(type(KINDS["condition"]), "inject", inject)
    with EndSignals(("SIGTERM",)) as signals:
        with pytest.raises(Interrupted) as raised, signals.raised():
            injector.inject(CONDITION)
        assert raised.value.exit_code == 128 + signal.SIGTERM and not journal.entries() and not injector.active
        os.kill(os.getpid(), signal.SIGTERM)  # later ones are counted again
        assert signals.count == 2


def test_a_second_signal_does_not_break_off_the_undoing(
    injector: FaultInjector, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone = []

    def inject(_kind: RealFault, _plan: Plan) -> None:
        assert injector.active
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60.0)

    def undo(_kind: RealFault, _plan: Plan) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        undone.append(True)

    monkeypatch.setattr(type(KINDS["condition"]), "inject", inject)
    monkeypatch.setattr(type(KINDS["condition"]), "undo", undo)
    with EndSignals(("SIGTERM",)) as signals:
        with pytest.raises(Interrupted), signals.raised():
            injector.inject(CONDITION)
        assert signals.count == 2 and undone and not injector.active and not journal.entries()


def test_a_signal_that_breaks_off_the_undoing_leaves_it_to_the_end(
    injector: FaultInjector, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def undo(_kind: RealFault, _plan: Plan) -> None:
        calls.append(True)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60.0)

    def inject(_kind: RealFault, _plan: Plan) -> None:
        raise NotFound("It has ended.", hint="try again")

    monkeypatch.setattr(type(KINDS["condition"]), "inject", inject)
    monkeypatch.setattr(type(KINDS["condition"]), "undo", undo)
    monkeypatch.setattr(injector_module, "ACTING_TIMEOUT_S", 0.01)
    with EndSignals(("SIGTERM",)) as signals:
        with pytest.raises(Interrupted), signals.raised():
            injector.inject(CONDITION)
        assert injector.active and journal.entries()
        injector._acting = 1  # as if the signal had come while it was counted down
        injector.__exit__(None, None, None)
        injector._acting = 0
    assert len(calls) == 2 and not injector.active and not journal.entries()


def test_leaving_undoes_everything(injector: FaultInjector, host: Path, journal: Journal) -> None:
    injector.inject(CONDITION)
    injector.inject(FaultRequest("preempt", host_id="host-a"))
    injector.__exit__(None, None, None)
    assert not list((host / "conditions").iterdir()) and not (host / "preemption-notice.json").exists()
    assert not journal.entries()


def test_a_notice_of_somebody_else_is_neither_replaced_nor_removed(injector: FaultInjector, host: Path) -> None:
    notice, asked = host / "preemption-notice.json", FaultRequest("preempt", host_id="host-a", lasts_s=600.0)
    kind = KINDS["preempt"]
    plan = kind.plan(injector._site(kind, asked))
    notice.write_text('{"deadline_s": 30.0, "source": "a cloud"}')
    with pytest.raises(NotFound, match=r"a notice in .* already: nothing was done"):
        injector.inject(asked)
    with pytest.raises(NotFound, match="already"):
        kind.inject(plan)  # it came between the two
    kind.undo(plan)
    assert "a cloud" in notice.read_text()
    notice.unlink()
    done = injector.inject(asked)
    assert done.injection_id in notice.read_text()
    notice.write_text('{"deadline_s": 20.0, "source": "a cloud"}')
    injector.undo(done.injection_id)
    assert "a cloud" in notice.read_text()


def test_whoever_undoes_waits_for_one_who_is_at_it(
    injector: FaultInjector, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def undo(_kind: RealFault, _plan: Plan) -> None:
        begun.set()
        assert go_on.wait(60.0)

    monkeypatch.setattr(injector_module, "JOIN_TIMEOUT_S", 0.0)
    monkeypatch.setattr(type(KINDS["condition"]), "undo", undo)
    done = injector.inject(msgspec.structs.replace(CONDITION, lasts_s=0.01))
    assert begun.wait(60.0) and injector.active == (done.injection_id,), "it lasts until it is undone"
    left = []
    leaving = threading.Thread(target=lambda: (injector.__exit__(None, None, None), left.extend(journal.entries())))
    leaving.start()
    leaving.join(0.05)
    assert leaving.is_alive() and journal.entries()
    go_on.set()
    leaving.join(60.0)
    assert not leaving.is_alive() and not left and not injector.active
    with pytest.raises(Forbidden, match="is ending"):
        injector.inject(CONDITION)


def test_one_that_cannot_be_undone_leaves_none_of_the_others(
    injector: FaultInjector, host: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def undo(_kind: RealFault, _plan: Plan) -> None:
        raise OSError("the disk is gone")

    stuck = injector.inject(CONDITION)
    injector.inject(FaultRequest("preempt", host_id="host-a"))
    with monkeypatch.context() as broken:
        broken.setattr(type(KINDS["condition"]), "undo", undo)
        with pytest.raises(ConfigurationError, match="the disk is gone") as raised:
            injector.undo_all()
    assert stuck.injection_id in raised.value.message
    assert not (host / "preemption-notice.json").exists()
    assert injector.active == (stuck.injection_id,) and [e.fault for e in journal.entries()] == ["condition"]
    injector.undo_all()
    assert not journal.entries()


def test_a_fault_that_cannot_be_recorded_lasts_all_the_same(injector: FaultInjector, api: Api, host: Path) -> None:
    api.is_away = True
    done = injector.inject(CONDITION)
    assert "is away" in done.not_recorded and injector.active == (done.injection_id,)
    assert list((host / "conditions").iterdir())


def test_a_fault_of_a_service_needs_the_mark_of_jobs_on_every_page(injector: FaultInjector, api: Api) -> None:
    old = {"job": "old", "state": "running", "spec": {"job": "old"}}
    api.other_jobs = {"items": [old], "next_before": None}
    with pytest.raises(Forbidden, match="Job old may not be broken"):
        injector.inject(FaultRequest("service-pause"))


def test_a_fault_of_a_rank_asks_for_its_job_alone(injector: FaultInjector, api: Api) -> None:
    api.spec["injectable"] = False
    api.other_jobs = {"items": [], "next_before": None}  # so many newer jobs that this one is in no list
    for request in (CONDITION, FaultRequest("exit", job="gpt", rank=0)):
        with pytest.raises(Forbidden, match="Job gpt may not be broken"):
            injector.inject(request)


@pytest.mark.processes
def test_what_a_killed_injector_left_is_undone_by_the_next(
    injector: FaultInjector, host: Path, journal: Journal
) -> None:
    injector.inject(CONDITION)
    (entry,) = journal.entries()
    assert not entry.is_left and undo_left(journal) == []
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(60.0)
    left = msgspec.structs.replace(entry, pid=ended.pid)
    (path,) = (host.parent / "injections").iterdir()
    path.write_bytes(msgspec.json.encode(left))
    assert [e.injection_id for e in undo_left(journal)] == [entry.injection_id]
    assert not list((host / "conditions").iterdir()) and not journal.entries()


def test_a_process_with_the_pid_of_the_injector_is_not_the_injector() -> None:
    assert JournalEntry("one", "kill", "", {}, os.getpid(), 1).is_left


@pytest.mark.parametrize(
    "request_",
    [CONDITION, FaultRequest("kill", job="gpt", rank=0), FaultRequest("service-pause")],
    ids=lambda request: request.fault,
)
def test_a_job_that_is_not_marked_is_left_alone(host: Path, journal: Journal, request_: FaultRequest) -> None:
    injector = FaultInjector(Api(injectable=False), clock=CLOCK, journal=journal, state_dir=host)
    with pytest.raises(Forbidden, match="may not be broken on purpose"):
        injector.inject(request_)
    assert not journal.entries() and not (host / "conditions").exists()


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (FaultRequest("melt"), NotFound, "no fault 'melt'"),
        (FaultRequest("kill"), UsageError, "needs a rank"),
        (FaultRequest("preempt"), UsageError, "needs a host"),
        (FaultRequest("kill", job="gpt", rank=7), NotFound, "no rank 7"),
        (FaultRequest("kill", job="gpt", rank=0), NotFound, "does not run"),
        (FaultRequest("exit", job="gpt", rank=0, options={"code": "x"}), UsageError, "code=x is not valid"),
        (
            FaultRequest("disk-full", host_id="host-a", options={"max_gib": "inf"}),
            UsageError,
            "max_gib=inf is not valid",
        ),
        (
            FaultRequest("net-loss", host_id="host-a", options={"percent": "nan"}),
            UsageError,
            "percent=nan is not valid",
        ),
        (FaultRequest("exit", job="gpt", rank=0, options={"speed": "1"}), UsageError, "no option 'speed'"),
        (FaultRequest("condition", host_id="host-a", options={"severity": "bad"}), UsageError, "no such severity"),
        (FaultRequest("preempt", host_id="host-a", options={"deadline_s": "86401"}), UsageError, "at most a day"),
        (FaultRequest("preempt", host_id="host-a", options={"deadline_s": "0"}), UsageError, "above 0"),
        (FaultRequest("disk-full", host_id="host-a"), Forbidden, "that others use"),
        (FaultRequest("net-cut", host_id="host-a"), Forbidden, "network namespace of its own"),
        (FaultRequest("xid", host_id="host-a"), Forbidden, "its probes read the machine itself"),
        (FaultRequest("service-kill", options={"service": "cook"}), UsageError, "no service 'cook'"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_nothing(
    injector: FaultInjector, journal: Journal, wrong: FaultRequest, error: type[FlyballError], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        injector.inject(wrong)
    assert raised.value.hint and not journal.entries() and not injector.active


def test_the_list_has_every_fault_with_what_it_lacks_here(injector: FaultInjector) -> None:
    offers = {offer.fault: offer for offer in injector.offers(host_id="host-a", job="gpt", rank=0)}
    assert list(offers) == list(KINDS)
    assert not offers["condition"].lacks and "does not run" in offers["kill"].lacks
    assert all(kind.about and kind.name == name for name, kind in KINDS.items())


def test_a_gpu_is_broken_in_the_recorded_readings_and_mended(
    tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = tmp_path / "nvml.json"
    before = '{"gpus": [{"pci": "00000000:3b:00.0", "celsius": 40}]}'
    readings.write_text(before)
    monkeypatch.setattr(gpus, "probe_root", lambda _site: tmp_path)
    kind = KINDS["gpu-lost"]
    plan = kind.plan(FaultSite(api, CLOCK, "one", values=kind.values({})))
    assert readings.read_text() == before
    kind.inject(plan)
    nvml = RecordedNvml(readings)
    with pytest.raises(RecordedNvml.NVMLError) as raised:
        nvml.nvmlDeviceGetTemperature(nvml.nvmlDeviceGetHandleByIndex(0), 0)
    assert raised.value.value == RecordedNvml.NVML_ERROR_GPU_IS_LOST
    kind.undo(plan)
    assert readings.read_text() == before
    readings.write_text("{}")
    kind.undo(plan)
    assert readings.read_text() == "{}", "somebody else's change stays"


def test_an_agent_takes_its_own_token_only(injector: FaultInjector, host: Path) -> None:
    def ask(path: str, body: bytes | None = None, token: str = "t" * 32, method: str | None = None) -> Any:  # noqa: ANN401 - JSON
        asked = urllib.request.Request(
            agent.url + path, data=body, method=method, headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["code"]

    with InjectionAgent(injector, "t" * 32, port=0, announce=lambda _: None) as agent:
        assert ask("/v1/injections", token="wrong") == (401, "unauthorized")
        assert ask("/v1/injections") == []
        assert ask("/v1/other") == (404, "not_found")
        assert ask("/v1/injections", b"{") == (400, "invalid_message")
        assert ask("/v1/injections", b'{"fault": "' + b"x" * 20_000 + b'"}') == (400, "invalid_message")
        done = ask("/v1/injections", msgspec.json.encode(CONDITION))
        assert ask("/v1/injections") == [done["injection_id"]] and list((host / "conditions").iterdir())
        ask(f"/v1/injections/{done['injection_id']}", method="DELETE")
        assert ask("/v1/injections") == [] and not list((host / "conditions").iterdir())


def test_a_daemon_is_started_again_by_its_arguments_whatever_its_title_says() -> None:
    words = ["--state-dir", "/state/host-a", "--host-id", "host-a"]
    again = [sys.executable, "-P", "-m", "host_daemon", *words]
    titled = ("flyball:", "host", "daemon", "host-a:", "host_daemon", *words)
    assert command_of(titled, "host_daemon") == again
    assert command_of(("/usr/bin/python3", "-P", "-m", "host_daemon", *words), "host_daemon") == again
    assert command_of(("redis-server", "*:6379"), "services.main") == ["redis-server", "*:6379"]
