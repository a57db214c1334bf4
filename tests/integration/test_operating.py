"""Prometheus' rules and Grafana's dashboard, beside the metrics that a real supervisor serves, and the page on them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from services.main import Supervisor
from services.settings import load_settings

ROOT = Path(__file__).parents[2]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/flyball.json").read_text())
PANELS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
PAGE = (ROOT / "docs" / "how-to" / "operating.md").read_text()
METRIC = re.compile(r"\bflyball_[a-z_]+")
PART_OF = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture
def scrape(tmp_path: Path) -> Iterator[str]:
    """What a supervisor with a job that waits for hosts serves."""
    supervisor = Supervisor(load_settings(state_dir=tmp_path, port=0, log_target="file", database_url="", redis_url=""))
    supervisor.start()
    try:
        with httpx.Client(base_url=supervisor.url, timeout=60.0) as client:
            job = {
                "job": "gpt",
                "argv": ["train.py"],
                "workdir": "/",
                "nnodes": 2,
                "nproc_per_node": 1,
                "max_restarts": 3,
            }
            submitted = client.post("/v1/jobs", json=job, headers={"Authorization": f"Bearer {supervisor.token}"})
            assert submitted.status_code == 201, submitted.text
            yield client.get("/metrics").raise_for_status().text
    finally:
        supervisor.stop()


def names_of(scraped: str) -> set[str]:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.MULTILINE))
    return {name for name, kind in kinds.items() if kind != "unknown"}


def test_every_metric_that_somebody_is_pointed_to_exists(scrape: str) -> None:
    known = names_of(scrape)
    for what in (*(rule["expr"] for rule in RULES), *PANELS, PAGE):
        for name in METRIC.findall(what):
            assert name in known or PART_OF.sub("", name) in known, f"{name} in {what[:80]}"


def test_a_job_that_waits_is_measured(scrape: str) -> None:
    lines = dict(line.rsplit(" ", 1) for line in scrape.splitlines() if not line.startswith("#"))
    assert float(lines['flyball_job_running{training_job="gpt"}']) == 0.0
    assert float(lines['flyball_job_newest_step{training_job="gpt"}']) == -1.0
    assert float(lines['flyball_job_restarts_allowed{training_job="gpt"}']) == 3.0
    assert float(lines['flyball_job_last_step_timestamp_seconds{training_job="gpt"}']) > 1e9
    assert float(lines['flyball_job_recovery_point_step{tier="memory",training_job="gpt"}']) == -1.0
    assert float(lines['flyball_hosts{state="silent"}']) == 0.0
    assert float(lines['flyball_ready{check="database"}']) == float(lines['flyball_ready{check="leader"}']) == 1.0


def test_every_alert_says_what_to_do_in_the_page() -> None:
    names = [rule["alert"] for rule in RULES]
    assert names == re.findall(r"^### (Flyball\w+)$", PAGE, re.MULTILINE), "each alert has a section, in the same order"
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/how-to/operating.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


def test_what_is_provisioned_fits_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    targets = scraped["static_configs"][0]["targets"]
    parts = {name for name, service in services.items() if "services.main" in service.get("command", ())}
    assert {target.removesuffix(":7370") for target in targets} == parts
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "flyball.yml").read_text())["providers"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_the_rules() -> None:
    words = ["promtool", "check", "rules", ROOT / "deploy/prometheus/alerts.yml"]
    assert subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0
