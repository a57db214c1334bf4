"""A real job on the dashboard: it trains, a worker is killed, and the incident opens and resolves before the reader's
eyes. Leaves pictures of the pages in `.pictures`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.commands.flyball import FlyballProcess
from support.commands.run_folders import run_folder
from support.servers.browser import CHROMIUM, DEADLINE_S, Browser
from support.servers.here import bearer
from support.servers.page_audit import axe_core, serious_findings

PICTURES = Path(__file__).parents[2] / ".pictures"
SCRIPT = """
import os, time, torch, torch.distributed as dist
import flyball
dist.init_process_group("gloo")
job = flyball.attach()
state = {"loss": torch.tensor(4.0)}
for step in range(job.restore(state), 100_000):
    enough = torch.tensor([float(os.path.exists("enough"))])  # each rank checks, all decide together
    dist.all_reduce(enough)
    time.sleep(0.1)
    state["loss"] = 1.0 + (state["loss"] - 1.0) * 0.97
    job.step(step, loss=state["loss"])
    job.save(step, state)
    print(f"step {step} loss {state['loss'].item():.4f}", flush=True)
    if enough:
        break
dist.barrier()
dist.destroy_process_group()
"""
IS_LIVE = "document.getElementById('link-text')?.textContent === 'live'"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with run_folder() as folder:
        yield folder


def printed(run: FlyballProcess, pattern: str) -> str:
    """What the running command has printed about where things are."""
    match: re.Match[str] = run.wait_for(lambda: re.search(pattern, run.err), pattern)
    return match[1]


def test_a_fault_opens_and_resolves_without_a_reload(
    place: Path, browser: Browser, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    axe = axe_core(pytestconfig.cache.mkdir("axe-core"))
    (place / "train.py").write_text(SCRIPT)
    with FlyballProcess(place, "run", "--nproc-per-node", "2", "--job", "live", "train.py") as run:
        url = printed(run, r"dashboard (http://[0-9.:]+)")
        token = Path(printed(run, r"state and logs in (\S+)"), "supervisor", "token").read_text().strip()
        _look_through(browser, url, token, axe)
        assert browser.errors == []
        (place / "enough").touch()
        assert run.end() == 0, run.err


def _look_through(browser: Browser, url: str, token: str, axe: str) -> None:
    browser.open(f"{url}/?token={token}")
    browser.until("document.querySelector('#running h2')?.textContent === 'live'")
    browser.until("/Goodput now/.test(document.getElementById('running')?.textContent)")
    browser.until("/Steps per second\\s*[0-9]/.test(document.getElementById('running')?.textContent)")
    browser.until("document.querySelector('#running .pace path') !== null")
    _check(browser, "training", axe)

    browser.open(f"{url}/jobs/live")
    browser.until(f"document.querySelector('#progress .steps') && {IS_LIVE}")
    about = "document.getElementById('log-about').textContent"
    browser.until(f"{about}.startsWith('generation ')")
    browser.evaluate(f"window.isTheSamePage = true; window.before = {about}")
    with httpx.Client(base_url=url, headers=bearer(token), timeout=DEADLINE_S) as client:
        os.kill(client.get("/v1/jobs/live").json()["ranks"][1]["pid"], signal.SIGKILL)
    browser.until("document.querySelector('#open-incidents a[href=\"/incidents/inc-1\"]')?.textContent")
    browser.until("/resolved/.test(document.getElementById('incident-list')?.textContent)")
    browser.until("document.querySelector('#progress a[href=\"/incidents/inc-1\"] .outage') !== null")
    browser.until(f"{about}.startsWith('generation ') && {about} !== window.before")
    assert browser.evaluate("window.isTheSamePage"), "nothing was reloaded"
    assert browser.evaluate("document.querySelector('#open-incidents .incident')") is None
    _choose(browser, "timeline-kind", "decision")
    timeline = "[...document.querySelectorAll('#timeline li')].map((line) => line.textContent)"
    browser.until(f"{timeline}.length > 1 && {timeline}.every((line) => line.includes('dec-'))")
    _choose(browser, "log-find", "STEP")
    browser.until(f"/^[1-9][0-9]* lines of generation/.test({about})")
    assert browser.evaluate(
        "document.getElementById('log').textContent.split('\\n').every((l) => /^[0-9]+: step/.test(l))"
    )
    assert browser.evaluate("[...document.querySelectorAll('#job .act')].map((one) => one.dataset.act)") == [
        "checkpoint",
        "stop",
    ]
    _check(browser, "job", axe)

    browser.evaluate("document.querySelector('#incident-list a[href=\"/incidents/inc-1\"]').click()")
    browser.until("document.querySelector('#story')?.textContent.includes('Verified: training is past the step')")
    browser.until("/step [0-9]+/.test(document.getElementById('log')?.textContent)")
    browser.until("document.getElementById('cost')?.textContent.includes('of the job')")
    chosen = browser.evaluate("[...document.querySelectorAll('.weighed .chosen')].map(one => one.textContent)")
    assert any("restart in place" in one for one in chosen), chosen
    _check(browser, "incident", axe)

    browser.open(f"{url}/decisions/dec-2")
    browser.until("location.pathname + location.hash === '/incidents/inc-1#dec-2'")
    browser.open(f"{url}/incidents?state=open")
    browser.until("/No incident is open/.test(document.getElementById('list')?.textContent)")
    browser.evaluate("document.querySelector('.filter a').click()")
    browser.until(f"document.querySelector('#inc-1') && {IS_LIVE}")
    _check(browser, "incidents", axe)


def _choose(browser: Browser, field: str, value: str) -> None:
    browser.evaluate(f"document.getElementById('{field}').value = '{value}'")
    browser.evaluate(f"document.getElementById('{field}').dispatchEvent(new Event('change'))")


def _check(browser: Browser, name: str, axe: str) -> None:
    """Take pictures, and look for what readers could not use: on a wide screen, in the dark, and on a phone."""
    for screen, width, dark in (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
        browser.look(width=width, dark=dark)
        browser.picture(PICTURES / f"{name}-{screen}.png")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
        if screen != "phone":
            assert serious_findings(browser, axe) == [], (name, screen)
    browser.look()
