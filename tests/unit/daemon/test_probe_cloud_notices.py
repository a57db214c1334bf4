"""Notices of clouds, in their documented formats, over real HTTP from a server on this machine."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.reports.signals import PreemptionNotice
from host_daemon.probes.findings import NotAvailableError
from host_daemon.probes.notices.cloud_notices import CloudNotices, Notice, aws_notice, azure_notice, gce_notice
from host_daemon.probes.notices.notice_watch import Notices
from host_daemon.settings import DaemonSettings, parse_settings
from host_daemon.store.database import HostDatabase
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import SignalOutbox

NOW = 1_789_719_000.0
SPOT = '{"action": "terminate", "time": "2026-09-18T08:22:00Z"}'
AZURE = {
    "DocumentIncarnation": 2,
    "Events": [
        {
            "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": ["train-7"],
            "EventStatus": "Scheduled",
            "NotBefore": "Fri, 18 Sep 2026 08:22:00 GMT",
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
    ],
}
AT = 1_789_719_720.0  # 2026-09-18T08:22:00Z


def test_formats() -> None:
    assert aws_notice(SPOT) == Notice(AT, "aws spot terminate")
    assert aws_notice('{"action": "none"}') is None and aws_notice("<html>") is None and aws_notice("[]") is None
    assert gce_notice("FALSE", "NONE", NOW) is None
    assert gce_notice("TRUE\n", "NONE", NOW) == Notice(NOW + 30, "gce preemption")
    assert gce_notice("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", NOW) == Notice(NOW + 60, "gce host maintenance")
    assert gce_notice("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", NOW) is None, "a live migration takes no host away"
    assert azure_notice(json.dumps(AZURE), "train-7", NOW) == Notice(AT, "azure preempt")
    assert azure_notice(json.dumps(AZURE), "train-8", NOW) is None
    assert azure_notice('{"Events": []}', "train-7", NOW) is None and azure_notice("nonsense", "", NOW) is None
    begun = {"Events": [{**AZURE["Events"][0], "EventStatus": "Started", "NotBefore": ""}]}  # type: ignore[index]
    assert azure_notice(json.dumps(begun), "train-7", NOW) == Notice(NOW, "azure preempt")


class Cloud:
    """A metadata service: answers by path, and what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.statuses: dict[str, int] = {}  # in place of 200
        self.asked = 0
        self.headers: dict[str, str] = {}
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                path = self.path.partition("?")[0]
                cloud.headers[path] = str(self.headers)
                cloud.asked += 1
                text = cloud.answers.get(path)
                self.send_response(404 if text is None else cloud.statuses.get(path, 200))
                self.end_headers()
                self.wfile.write((text or "").encode())

            do_GET = do_PUT = answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    made = Cloud()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_aws(cloud: Cloud) -> None:
    cloud.answers["/latest/api/token"] = "secret"
    asked = CloudNotices("aws", cloud.url)
    assert asked.check(NOW) is None, "404: no notice"
    cloud.answers["/latest/meta-data/spot/instance-action"] = SPOT
    assert asked.check(NOW) == Notice(AT, "aws spot terminate")
    assert "X-aws-ec2-metadata-token: secret" in cloud.headers["/latest/meta-data/spot/instance-action"]


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_aws_answers_that_say_nothing(cloud: Cloud, status: int) -> None:
    path = "/latest/meta-data/spot/instance-action"
    cloud.answers |= {"/latest/api/token": "old", path: SPOT}
    asked = CloudNotices("aws", cloud.url)
    asked.check(NOW)
    cloud.answers["/latest/api/token"] = "new"
    cloud.statuses[path] = status
    with pytest.raises(NotAvailableError, match=f"answers {status}"):
        asked.check(NOW)
    del cloud.statuses[path]
    assert asked.check(NOW) == Notice(AT, "aws spot terminate")
    assert f"X-aws-ec2-metadata-token: {'new' if status == 401 else 'old'}" in cloud.headers[path]


def test_gce(cloud: Cloud) -> None:
    root = "/computeMetadata/v1/instance"
    cloud.answers |= {f"{root}/preempted": "FALSE", f"{root}/maintenance-event": "NONE"}
    asked = CloudNotices("gce", cloud.url)
    assert asked.check(NOW) is None
    cloud.answers[f"{root}/preempted"] = "TRUE"
    assert asked.check(NOW) == Notice(NOW + 30, "gce preemption")
    assert "Metadata-Flavor: Google" in cloud.headers[f"{root}/preempted"]


def test_azure(cloud: Cloud) -> None:
    cloud.answers["/metadata/instance/compute/name"] = "train-7"
    cloud.answers["/metadata/scheduledevents"] = json.dumps(AZURE)
    assert CloudNotices("azure", cloud.url).check(NOW) == Notice(AT, "azure preempt")


def test_another_cloud_is_not_available(cloud: Cloud) -> None:
    for name in ("aws", "gce", "azure"):
        with pytest.raises(NotAvailableError, match="answers 404"):
            CloudNotices(name, cloud.url).check(NOW)  # type: ignore[arg-type]  # one of the three
    cloud.server.shutdown()
    cloud.server.server_close()
    with pytest.raises(NotAvailableError, match="does not answer"):
        CloudNotices("gce", cloud.url).check(NOW)


def settings_for(cloud: Cloud, name: str, folder: Path) -> DaemonSettings:
    words = ("--state-dir", str(folder), "--host-id", "a", "--supervisor", "http://127.0.0.1:1", "--token-file")
    (folder / "token").write_text(secrets.token_hex(32))
    return parse_settings([*words, str(folder / "token"), "--cloud-notices", name, "--metadata-url", cloud.url], {})


def test_hiccups_and_odd_answers_change_nothing(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer is looked at twice or more, so the service is not asked only every 30 s."""
    monkeypatch.setattr("host_daemon.probes.notices.notice_watch.CLOUD_INTERVAL_S", 0.01)
    events = "/metadata/scheduledevents"
    cloud.answers |= {"/metadata/instance/compute/name": "train-7", events: json.dumps(AZURE)}
    database = HostDatabase(tmp_path / "daemon.sqlite")
    outbox = SignalOutbox(database, SystemClock(), source="a", incarnation="i1")
    told: list[PreemptionNotice] = []
    notices = Notices(
        settings_for(cloud, "azure", tmp_path),
        tmp_path / "notice.json",
        facts=Facts(database),
        outbox=outbox,
        clock=SystemClock(),
        wake=lambda: None,
    )

    async def watch() -> None:
        loop = asyncio.create_task(notices.run())

        async def until(is_reached: Callable[[], bool]) -> None:
            while not is_reached():
                assert not loop.done(), loop.result()
                told.extend(s.body for s in outbox.due() if isinstance(s.body, PreemptionNotice))
                await asyncio.sleep(0.005)

        async with asyncio.timeout(30.0):
            await until(lambda: bool(told))
            for status, text in (
                (503, ""),
                (200, '{"Events": [{"EventType": ["Preempt"]}]}'),
                (200, json.dumps(AZURE)),
            ):
                cloud.statuses[events], cloud.answers[events] = status, text
                asked = cloud.asked
                await until(lambda before=asked: cloud.asked > before + 5)  # type: ignore[misc]
        loop.cancel()

    asyncio.run(watch())
    database.close()
    assert {(notice.source, notice.deadline_at) for notice in told} == {("azure preempt", AT)}
    logged = capsys.readouterr().out
    assert logged.count("cloud_notices_not_available") == logged.count("cloud_notices_failed") == 1, logged


def test_a_notice_is_signalled_once_and_withdrawn_once(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host_daemon.probes.notices.notice_watch.CLOUD_INTERVAL_S", 0.01)
    root = "/computeMetadata/v1/instance"
    cloud.answers |= {f"{root}/preempted": "FALSE", f"{root}/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
    database = HostDatabase(tmp_path / "daemon.sqlite")
    outbox = SignalOutbox(database, SystemClock(), source="a", incarnation="i1")
    told: list[PreemptionNotice] = []
    settings = settings_for(cloud, "gce", tmp_path)

    async def watch(count: int) -> None:
        watched = Notices(
            settings,
            tmp_path / "notice.json",
            facts=Facts(database),
            outbox=outbox,
            clock=SystemClock(),
            wake=lambda: None,
        )
        loop = asyncio.create_task(watched.run())
        async with asyncio.timeout(30.0):
            while len(told) < count:
                told.extend(s.body for s in outbox.due() if isinstance(s.body, PreemptionNotice))
                await asyncio.sleep(0.01)
        loop.cancel()

    asyncio.run(watch(1))
    cloud.answers[f"{root}/maintenance-event"] = "NONE"
    asyncio.run(watch(2))  # another daemon: it knows what was told
    database.close()
    assert [(notice.source, notice.deadline_at > 0.0) for notice in told] == [
        ("gce host maintenance", True),
        ("gce host maintenance", False),
    ]
