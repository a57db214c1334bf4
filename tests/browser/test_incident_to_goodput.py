"""From an incident to what it cost, in a real browser: an operator approves the restart on the incident's page, and
looks at the job's time beside simulated runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.clocks.waits import until
from support.hosts.played import PlayedHost
from support.servers.browser import CHROMIUM, Browser
from support.servers.here import client_of, supervisor_in
from support.servers.page_audit import axe_core, serious_findings

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import JobSpec, Phase
from flyball.contracts.decisions import StopWorkers
from flyball.contracts.reports.rank_columns import CompletedSteps, RankProgress, Workers
from flyball.contracts.reports.signals import Signal, WorkerExited
from flyball.contracts.wire import encode
from services.dashboard import training_pages
from services.main import Supervisor
from simulator.fleet import scenario
from simulator.fleet.result import simulate

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
PICTURES = Path(__file__).parents[2] / ".pictures"
IS_LIVE = "document.getElementById('link-text')?.textContent === 'live'"
APPROVE = "document.querySelector('#incident [data-act=approve]')"
GO = "document.querySelector('#act button.primary')"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with supervisor_in(tmp_path / "supervisor", policy={"approve": ["restart_in_place"]}) as supervisor:
        yield supervisor


def typed(text: str) -> str:
    field = "document.getElementById('act-typed')"
    return f"{field}.value = '{text}'; {field}.dispatchEvent(new Event('input', {{bubbles: true}})); 0"


def train_and_die(client: httpx.Client, host: PlayedHost) -> None:
    """A job of one rank makes four steps, and its worker is killed."""
    host.report()
    until(lambda: client.get("/v1/hosts").json()["items"])
    spec = JobSpec(job="demo", argv=("train.py",), workdir="/")
    assert client.post("/v1/jobs", content=encode(spec)).status_code == 201
    (start,) = until(host.obey)
    generation = start.body.placement.generation
    now = SystemClock().wall_s()
    steps = CompletedSteps("demo", generation, (0,), 0, tuple((now - ago,) for ago in (3, 2, 1, 0)))
    host.report(
        workers=(Workers("demo", generation, (0,), (9,)),),
        progress=(RankProgress((Phase.STEP,), (3,), (0.1,)),),
        completed=(steps,),
    )
    until(lambda: client.get("/v1/jobs/demo").json()["newest_step"] == 3)
    exited = WorkerExited("demo", generation, 0, pid=9, exit_code=None, signal_number=9, last_step=3)
    host.report(signals=(Signal(source="host-a", incarnation="i1", seq=1, at=SystemClock().wall_s(), body=exited),))


def test_an_operator_approves_an_incident_and_sees_what_it_cost(
    browser: Browser,
    supervisor: Supervisor,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pytestconfig.cache is not None
    axe = axe_core(pytestconfig.cache.mkdir("axe-core"))
    with client_of(supervisor) as client, PlayedHost("host-a", supervisor.token, [supervisor.url]) as host:
        train_and_die(client, host)
        browser.open(f"{supervisor.url}/?token={supervisor.token}")
        browser.until(IS_LIVE)
        browser.open(f"{supervisor.url}/incidents/inc-1")
        browser.until(f"!!{APPROVE} && {IS_LIVE}")
        assert browser.evaluate(f"getComputedStyle({APPROVE}).display") != "none"
        browser.picture(PICTURES / "approval.png")
        assert serious_findings(browser, axe) == []

        browser.evaluate(f"{APPROVE}.click(); 0")
        browser.until("document.querySelector('#act .plan')?.textContent.includes('restart in place')")
        browser.picture(PICTURES / "approval-dialog.png")
        assert browser.evaluate(f"{GO}.disabled"), "nothing is typed"
        browser.evaluate(typed("demo"))
        browser.evaluate(f"{GO}.click(); 0")
        browser.until("!document.getElementById('act').open")
        (stop,) = until(host.obey)
        assert isinstance(stop.body, StopWorkers)
        browser.until(f"{APPROVE} === null")
        browser.until("document.getElementById('story').textContent.includes('restart in place')")
        (entry,) = client.get("/v1/audit", params={"operation": "approve"}).json()["items"]
        assert entry["detail"]["target"] == "inc-1" and entry["idempotency_key"]
        lists_lead_on(client, monkeypatch)
        was_it_worth_it(browser, supervisor.url, tmp_path / "supervisor" / "simulations", axe)
    assert [error for error in browser.errors if "/logs?" not in error] == [], "this host has no logs to send"


def lists_lead_on(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a job says that its lists are cut, and where the rest is."""
    ids = [one["decision_id"] for one in client.get("/v1/decisions", params={"job": "demo"}).json()["items"]]
    assert len(ids) > 1 and "All decisions" not in client.get("/jobs/demo").text
    monkeypatch.setattr(training_pages, "MAX_DECISIONS", 1)
    assert 'href="/jobs/demo/decisions">All decisions' in client.get("/jobs/demo").text
    for number, decision_id in enumerate(reversed(ids)):
        page = client.get("/jobs/demo/decisions", params={"before": ids[-number]} if number else {}).text
        assert re.findall(r'<li id="(dec-\d+)"', page) == [decision_id]
        assert ("earlier ones" in page) is (decision_id != ids[0])
    assert 'id="inc-1"' in client.get("/incidents", params={"job": "demo"}).text
    assert "No such incident" in client.get("/incidents", params={"job": "other"}).text
    assert client.get("/incidents", params={"host": "a b"}).status_code == 422


def was_it_worth_it(browser: Browser, url: str, results: Path, axe: str) -> None:
    """The job's time by cause and over time; a simulated run beside another; a file that is no result."""
    browser.open(f"{url}/goodput")
    browser.until("document.querySelector('#waterfall')?.textContent.includes('worker killed')")
    causes = "[...document.querySelectorAll('#waterfall th[scope=row]')].map((one) => one.textContent)"
    assert browser.evaluate(f"{causes}[0]") == "elapsed" and browser.evaluate(f"{causes}.at(-1)") == "useful"
    assert browser.evaluate("document.querySelector('#lanes a').getAttribute('href')") == "/incidents/inc-1"
    look(browser, "goodput-job", axe)

    for number, settings in enumerate((["days=2"], ["days=2", "checkpoint.every_s=7200"])):
        done = simulate(scenario.load("small", settings), 1, "small")
        (results / f"small-{number}.json").write_bytes(encode(done.result))
    (results / "torn.json").write_bytes(encode(done.result)[:1000])
    (results / "..json").write_text("not listed")
    browser.open(f"{url}/goodput?run=simulation:small-0&with=simulation:small-1")
    browser.until("document.querySelector('#run .lead')?.textContent.includes('on 64 GPUs became training')")
    browser.until("document.querySelector('#comparison .lead')?.textContent.includes('points more')")
    assert "torn.json is not a result of the simulator" in browser.evaluate("document.body.textContent")
    assert browser.evaluate("document.querySelectorAll('#lanes path.use').length") > 3
    look(browser, "goodput-compared", axe, whole=True)
    browser.evaluate("document.querySelector('select[name=run]').value = 'job:demo'; 0")
    browser.evaluate("document.querySelector('form.choose').requestSubmit(); 0")
    browser.until("location.search === '?run=job%3Ademo&with=simulation%3Asmall-1'")
    browser.until("document.querySelector('#comparison .lead')?.textContent.startsWith('demo turned')")


def look(browser: Browser, name: str, axe: str, *, whole: bool = False) -> None:
    """Take pictures, and look for what readers could not use: on a wide screen, in the dark, and on a phone."""
    for screen, width, dark in (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
        browser.look(width=width, height=2400 if whole else 1000, dark=dark)
        browser.picture(PICTURES / f"{name}-{screen}.png")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, screen)
        if screen != "phone":
            assert serious_findings(browser, axe) == [], (name, screen)
    browser.look()
