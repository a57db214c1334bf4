"""The HTML report in a real browser, from a file: its pictures are drawn, and names from a log run nothing."""

from __future__ import annotations

import shutil
import subprocess
from itertools import cycle
from pathlib import Path

import msgspec
import pytest
from support.jobs.goodput_runs import interrupted_run

from goodput.account.timeline_bins import binned
from goodput.calculator import analyse
from goodput.show.html_report import to_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OWNED = "document.title='owned'"
HOSTILE = (f"<script>{OWNED}</script>", f'</script><img src=x onerror="{OWNED}">', f'"><svg onload={OWNED}>')

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


def test_its_pictures_are_drawn_and_names_run_nothing(tmp_path: Path) -> None:
    events = interrupted_run(job=HOSTILE[0], hosts=HOSTILE)
    causes = cycle(HOSTILE)
    events = [
        msgspec.structs.replace(e, data={**e.data, "cause": next(causes)}) if "cause" in e.data else e for e in events
    ]
    analysis = analyse(events)
    report = analysis.report
    bins = binned(analysis.timeline.intervals, report.started_at, report.ended_at, 100)
    page = tmp_path / "report.html"
    page.write_text(to_html(report, bins, source=HOSTILE[1]))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, "--virtual-time-budget=5000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert "<title>Goodput of &lt;script&gt;" in done.stdout
    assert ">owned<" not in done.stdout
    for picture in ("waterfall", "timeline", "over-time"):
        drawn = done.stdout.partition(f'<div id="{picture}"')[2].partition("</figure>")[0]
        assert 'class="main-svg"' in drawn, picture
