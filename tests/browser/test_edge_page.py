"""The live page in a real browser: it shows the API's data, live, and never treats text as markup."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostFacts, JobSpec
from flyball.contracts.credentials import host_credential
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import EngineStatus, Report
from flyball.contracts.wire import WIRE_VERSION, encode
from services.api import goodput
from services.main import Supervisor
from services.settings import load_settings

DEADLINE_S = 120.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


class Browser:
    """One page, driven over the pipe of Chromium's debugging protocol: JSON messages that end with a zero byte."""

    def __init__(self, profile: Path) -> None:
        to_child, self._commands = os.pipe()
        self._answers, from_child = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
        # Chromium reads commands from 3 and answers on 4; descriptors from 10 on avoid conflicts.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_child, from_child)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, ends), str(CHROMIUM), *flags, "--remote-debugging-pipe"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_child, from_child, *ends):
            os.close(end)
        self._read = b""
        self._number = 0
        self._session = ""
        self.errors: list[str] = []
        page = self._first_page()
        self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._ask("Runtime.enable")
        self._ask("Log.enable")
        self._ask("Page.enable")

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - whatever the expression gives
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> Any:  # noqa: ANN401 - whatever the expression gives
        deadline = time.monotonic() + DEADLINE_S
        while not (value := self._evaluate_between_pages(expression)):
            assert time.monotonic() < deadline, (expression, self.evaluate("document.body.innerText"), self.errors)
        return value

    def close(self) -> None:
        os.close(self._commands)
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        os.close(self._answers)

    def _first_page(self) -> str:
        """It may arrive after the reply to the first command."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            targets = self._ask("Target.getTargets")["targetInfos"]
            for target in targets:
                if target["type"] == "page":
                    return str(target["targetId"])
            assert time.monotonic() < deadline, targets

    def _evaluate_between_pages(self, expression: str) -> Any:  # noqa: ANN401 - whatever the expression gives
        """None also if the page was replaced during the evaluation, because the address leads to another one."""
        answer = self._answer("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"]["result"].get("value") if "result" in answer else None

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        answer = self._answer(method, **parameters)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _answer(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                readable, _, _ = select.select([self._answers], [], [], DEADLINE_S)
                assert readable, f"the browser did not answer {method} within {DEADLINE_S} s"
                chunk = os.read(self._answers, 1 << 16)
                assert chunk, "the browser ended"
                self._read += chunk
            raw, _, self._read = self._read.partition(b"\0")
            answer: dict[str, Any] = json.loads(raw)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                return answer


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture
def no_room_for_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "MAX_AT_ONCE", 0)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(load_settings(state_dir=tmp_path / "supervisor", port=0))
    supervisor.start()
    yield supervisor
    supervisor.stop()


def test_the_page_shows_what_happens_and_no_text_becomes_markup(browser: Browser, supervisor: Supervisor) -> None:
    headers = {"Authorization": f"Bearer {supervisor.token}"}
    with httpx.Client(base_url=supervisor.url, headers=headers, timeout=DEADLINE_S) as client:
        browser.open(f"{supervisor.url}/?token={supervisor.token}")
        browser.until("document.getElementById('link-text')?.textContent === 'live'")
        assert browser.evaluate("location.href") == f"{supervisor.url}/", "the token is out of the address"
        assert browser.evaluate("document.cookie") == "", "no script can read the cookie"

        facts = HostFacts(
            host_id="host-a",
            address="127.0.0.1",
            failure_domain=HOSTILE,
            engine_address="",
            free_port=1,
            daemon_version="0",
            pid=1,
        )
        report = Report(
            version=WIRE_VERSION,
            incarnation="i",
            sent_at=SystemClock().wall_s(),
            interval_s=30.0,
            facts=facts,
            engine=EngineStatus(alive=True),
        )
        daemon = {"Authorization": f"Bearer {host_credential(supervisor.token, 'host-a').token}"}
        assert client.post("/v1/reports", content=encode(report), headers=daemon).status_code == 200
        spec = JobSpec(job="demo", argv=("train.py", HOSTILE), workdir="/", hosts=("host-b",))
        assert client.post("/v1/jobs", content=encode(spec)).status_code == 201
        browser.until("document.getElementById('job-name').textContent === 'demo'")
        browser.until("document.getElementById('hosts').textContent.includes('host-a')")
        fault = Event(at=SystemClock().wall_s(), kind=EventKind.FAULT_INJECTED, job="demo", data={"fault": HOSTILE})
        assert client.post("/v1/events", content=encode([fault])).status_code == 204
        browser.until("document.getElementById('timeline').textContent.includes('fault injected')")

    for place in ("job-message", "hosts", "timeline"):
        assert HOSTILE.replace("_", " ") in browser.evaluate(f"document.getElementById('{place}').textContent"), place
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert "owned" not in browser.evaluate("document.title")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
    assert browser.errors == []


def test_the_header_shows_trouble_only_while_there_is_some(browser: Browser, supervisor: Supervisor) -> None:
    header = "document.getElementById('link-text')?.textContent"
    browser.open(f"{supervisor.url}/?token={supervisor.token}")
    browser.until(f"{header} === 'live'")
    browser.evaluate("window.answered = window.fetch; window.fetch = () => Promise.reject(new Error('no route')); 0")
    browser.until(f"{header} === 'no route'")
    browser.evaluate("window.fetch = window.answered; 0")
    browser.until(f"{header} === 'live'")
    assert browser.evaluate("document.getElementById('link').className") == "link"


def test_goodput_that_is_busy_holds_up_nothing_else(
    browser: Browser, no_room_for_goodput: None, supervisor: Supervisor
) -> None:
    headers = {"Authorization": f"Bearer {supervisor.token}"}
    spec = JobSpec(job="demo", argv=("train.py",), workdir="/", hosts=("host-b",))
    with httpx.Client(base_url=supervisor.url, headers=headers, timeout=DEADLINE_S) as client:
        assert client.post("/v1/jobs", content=encode(spec)).status_code == 201
        assert client.get("/v1/goodput", params={"job": "demo"}).status_code == 503
    browser.open(f"{supervisor.url}/?token={supervisor.token}")
    browser.until("document.getElementById('checkpoints')?.textContent.includes('No recovery point yet')")
    browser.until("document.getElementById('link-text').textContent === 'live'")
