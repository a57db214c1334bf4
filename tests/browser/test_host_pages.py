"""The pages of hosts and of recovery in a real browser: an operator drains a host, after a look at the plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts.reports import report
from support.servers.browser import CHROMIUM, Browser
from support.servers.here import bearer, client_of, supervisor_in

from flyball.contracts.clock import SystemClock
from flyball.contracts.credentials import reader_token
from flyball.contracts.wire import encode
from services.main import Supervisor

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
LIVE = "document.getElementById('link-text')?.textContent === 'live'"
IS_OPERATOR = "document.documentElement.classList.contains('operator')"  # the page's modules have run
DRAIN = "document.querySelector('[data-act=drain]')"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with supervisor_in(tmp_path / "supervisor") as supervisor:
        yield supervisor


def typed(text: str) -> str:
    field = "document.getElementById('act-typed')"
    return f"{field}.value = '{text}'; {field}.dispatchEvent(new Event('input', {{bubbles: true}})); 0"


def test_an_operator_drains_a_host_from_the_map(browser: Browser, supervisor: Supervisor) -> None:
    go = "document.querySelector('#act button.primary')"
    with client_of(supervisor) as client:
        for host_id in ("host-a", "host-b"):
            daemon = bearer(supervisor.token, host_id)
            assert (
                client.post(
                    "/v1/reports",
                    content=encode(report(host_id, SystemClock().wall_s(), interval_s=600.0)),
                    headers=daemon,
                ).status_code
                == 200
            )
        browser.open(f"{supervisor.url}/?token={supervisor.token}")
        browser.until(LIVE)
        browser.open(f"{supervisor.url}/recovery")
        browser.until("document.body.textContent.includes('No job is running, so there is nothing to lose.')")
        browser.open(f"{supervisor.url}/hosts")
        browser.until("document.querySelectorAll('#map-legend li').length > 0")
        browser.evaluate("document.getElementById('map').focus(); 0")
        for key in ("ArrowRight", "Enter"):
            browser.evaluate(
                f"document.getElementById('map').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}})); 0"
            )
        assert browser.evaluate("document.getElementById('map-cell').textContent").startswith("host-b: ")
        browser.until(f"document.getElementById('one').textContent.includes('host-b') && !!{DRAIN}")
        assert browser.evaluate(f"getComputedStyle({DRAIN}).display") != "none"

        browser.evaluate(f"{DRAIN}.click(); 0")
        browser.until("document.querySelector('#act .plan')?.textContent.includes('What would be done')")
        assert browser.evaluate(f"{go}.disabled"), "nothing is typed"
        browser.evaluate(typed("host-a"))
        assert browser.evaluate(f"{go}.disabled"), "another name is typed"
        assert client.get("/v1/hosts/host-b").json()["drain"] is None
        browser.evaluate(typed("host-b"))
        browser.evaluate(f"{go}.click(); 0")
        browser.until("!document.getElementById('act').open")
        browser.until("document.getElementById('one').textContent.includes('Drain: ')")
        assert client.get("/v1/hosts/host-b").json()["drain"]["state"] in ("requested", "drained")
        (entry,) = client.get("/v1/audit", params={"operation": "drainHost"}).json()["items"]
        assert (entry["role"], entry["target"]) == ("operator", "host-b") and entry["idempotency_key"]
        assert browser.errors == []

        browser.open(f"{supervisor.url}/docs#operator=of-another-site")
        browser.until("location.pathname === '/docs' && location.hash === ''")
        browser.open(f"{supervisor.url}/hosts/host-b#operator=of-another-site")
        browser.until(f"!!{DRAIN} && {IS_OPERATOR} && getComputedStyle({DRAIN}).display != 'none'")
        assert browser.evaluate("location.hash + localStorage.length") == "1", "a link takes no rights away"
        browser.open(f"{supervisor.url}/?token={reader_token(supervisor.token)}")
        browser.until("location.search + location.hash + localStorage.length === '0'")
        browser.open(f"{supervisor.url}/hosts/host-b")
        browser.until(f"!!{DRAIN} && {LIVE}")
        assert browser.evaluate(f"getComputedStyle({DRAIN}).display") == "none", "a reader sees no button"
