"""The live page in a real browser: it shows the API's data, live, and never treats text as markup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts.reports import report
from support.servers.browser import CHROMIUM, Browser
from support.servers.here import bearer, client_of, supervisor_in

from flyball.contracts.checkpoints import PeerTransport
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobSpec
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import EngineStatus
from flyball.contracts.wire import encode
from services.api import goodput
from services.main import Supervisor

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
LOOKED_AT = "document.dispatchEvent(new Event('visibilitychange'))"  # refreshes at once

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@pytest.fixture
def no_room_for_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "MAX_AT_ONCE", 0)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with supervisor_in(tmp_path / "supervisor") as supervisor:
        yield supervisor


def test_the_page_shows_what_happens_and_no_text_becomes_markup(browser: Browser, supervisor: Supervisor) -> None:
    with client_of(supervisor) as client:
        browser.open(f"{supervisor.url}/?token={supervisor.token}")
        browser.until("document.getElementById('link-text')?.textContent === 'live'")
        assert browser.evaluate("location.href") == f"{supervisor.url}/", "the tokens are out of the address"
        assert browser.evaluate("document.cookie") == "", "no script can read the cookie"

        engine = EngineStatus(alive=True, transports=(PeerTransport("host-b", "tcp", HOSTILE),))
        hostile = report(sent_at=SystemClock().wall_s(), interval_s=30.0, domain=HOSTILE, engine=engine)
        daemon = bearer(supervisor.token, "host-a")
        assert client.post("/v1/reports", content=encode(hostile), headers=daemon).status_code == 200
        spec = JobSpec(job="demo", argv=("train.py", HOSTILE), workdir="/", hosts=("host-b",))
        assert client.post("/v1/jobs", content=encode(spec)).status_code == 201
        browser.until("document.querySelector('#running h2')?.textContent === 'demo'")
        browser.open(f"{supervisor.url}/jobs/demo")
        browser.until("document.getElementById('job-name')?.textContent === 'demo'")
        browser.until("document.getElementById('link-text')?.textContent === 'live'")
        fault = Event(at=SystemClock().wall_s(), kind=EventKind.FAULT_INJECTED, job="demo", data={"fault": HOSTILE})
        assert client.post("/v1/events", content=encode([fault])).status_code == 204
        browser.until("document.getElementById('timeline').textContent.includes('fault injected')")

    for place in ("job", "timeline"):
        assert HOSTILE.replace("_", " ") in browser.evaluate(f"document.getElementById('{place}').textContent"), place
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert "owned" not in browser.evaluate("document.title")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
    assert browser.errors == []


def test_the_header_shows_trouble_only_while_there_is_some(browser: Browser, supervisor: Supervisor) -> None:
    header = "document.getElementById('link-text')?.textContent"
    browser.open(f"{supervisor.url}/incidents?state=open")
    _log_in(browser, "a-wrong-token")
    browser.until("document.querySelector('[role=alert]')?.textContent.includes('This token is wrong')")
    _log_in(browser, supervisor.token)
    browser.until(f"{header} === 'live'")
    assert browser.evaluate("location.pathname + location.search + location.hash") == "/incidents?state=open"
    assert browser.evaluate("localStorage.length") == 1, "an operator's browser may change things"
    browser.evaluate("window.answered = window.fetch; window.fetch = () => Promise.reject(new Error('no route')); 0")
    browser.evaluate(LOOKED_AT)
    browser.until(f"{header} === 'no route'")
    browser.evaluate("window.fetch = window.answered; 0")
    browser.evaluate(LOOKED_AT)
    browser.until(f"{header} === 'live'")
    assert browser.evaluate("document.getElementById('link').className") == "link"
    browser.open(f"{supervisor.url}/incidents/inc-9")
    browser.until("document.querySelector('.failed h1') !== null")
    browser.until("document.documentElement.classList.contains('operator')")  # the page's modules have run
    assert browser.evaluate("document.getElementById('link')") is None, "an error is not live"
    browser.evaluate("document.querySelector('#logout button').click()")
    browser.until("location.pathname === '/login' && document.getElementById('token') !== null")
    assert browser.evaluate("localStorage.length") == 0


def _log_in(browser: Browser, token: str) -> None:
    browser.until("document.getElementById('token') !== null")
    browser.evaluate(f"document.getElementById('token').value = '{token}'; document.querySelector('form').submit()")


def test_goodput_that_is_busy_holds_up_nothing_else(
    browser: Browser, no_room_for_goodput: None, supervisor: Supervisor
) -> None:
    spec = JobSpec(job="demo", argv=("train.py",), workdir="/", hosts=("host-b",))
    with client_of(supervisor) as client:
        assert client.post("/v1/jobs", content=encode(spec)).status_code == 201
        assert client.get("/v1/goodput", params={"job": "demo"}).status_code == 503
    browser.open(f"{supervisor.url}/?token={supervisor.token}")
    browser.until("document.querySelector('#running h2')?.textContent === 'demo'")
    browser.open(f"{supervisor.url}/jobs/demo")
    browser.until("document.getElementById('checkpoints')?.textContent.includes('No recovery point yet')")
    browser.until("document.getElementById('link-text').textContent === 'live'")
