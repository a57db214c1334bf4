"""Prometheus' rules and Grafana's dashboard, beside the metrics that a real supervisor serves, and the page on them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.clocks.waits import until
from support.servers.here import client_of, supervisor_in

from services.main import Supervisor

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


needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """One with a job that waits for hosts."""
    folder = tmp_path_factory.mktemp("state")
    with supervisor_in(folder, log_target="file", database_url="", redis_url="") as own:
        job = {"job": "gpt", "argv": ["train.py"], "workdir": "/", "nnodes": 2, "nproc_per_node": 1, "max_restarts": 3}
        with client_of(own) as client:
            submitted = client.post("/v1/jobs", json=job)
            assert submitted.status_code == 201, submitted.text
        yield own


@pytest.fixture(scope="module")
def scrape(supervisor: Supervisor) -> str:
    """What it serves, once it has counted its event log."""

    def counted() -> str:
        text = httpx.get(f"{supervisor.url}/metrics", timeout=60.0).raise_for_status().text
        return text if "flyball_incidents_open" in text else ""

    return until(counted, "the metrics of the event log", 60.0)


@pytest.fixture
def prometheus(supervisor: Supervisor, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus with our rules, which scrapes that supervisor."""
    (tmp_path / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
                "rule_files": [str(ROOT / "deploy/prometheus/alerts.yml")],
                "scrape_configs": [
                    {"job_name": "flyball", "static_configs": [{"targets": [supervisor.url.removeprefix("http://")]}]}
                ],
            }
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        ["prometheus", "--config.file", tmp_path / "prometheus.yml", "--storage.tsdb.path", tmp_path / "data",
         "--web.listen-address", address, "--log.level", "error"],
    )  # fmt: skip
    try:
        with httpx.Client(
            base_url=f"http://{address}", timeout=30.0, transport=httpx.HTTPTransport(retries=8)
        ) as client:
            until(lambda: client.get("/-/ready").status_code == 200, "Prometheus is ready", 60.0)
            yield client
    finally:
        process.terminate()
        process.wait(30.0)


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
def test_each_alert_fires_on_a_cluster_that_is_ill_and_none_on_one_that_is_well() -> None:
    words = ["promtool", "test", "rules", ROOT / "tests/integration/alert_cases.yml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ill_cluster_has_a_case_of_each_alert() -> None:
    ill = yaml.safe_load((ROOT / "tests/integration/alert_cases.yml").read_text())["tests"][1]
    (expected,) = ill["promql_expr_test"]
    labels = {sample["labels"] for sample in expected["exp_samples"]}
    assert labels == {f'{{alertname="{rule["alert"]}"}}' for rule in RULES}


# Of these there is nothing before a job made a step, or before a report was refused.
LATER = ("flyball_job_recovery_point_age", "flyball_job_step_seconds", "flyball_job_loss", "flyball_reports_refused")


@needs_prometheus
def test_a_real_prometheus_evaluates_the_rules_and_every_panel(prometheus: httpx.Client) -> None:
    def asked(path: str, **parameters: str) -> Any:  # noqa: ANN401 - JSON
        answer = prometheus.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in asked("rules")["groups"] for rule in group["rules"]]

    def empty_panels() -> list[str]:
        return [panel for panel in PANELS if not asked("query", query=panel)["result"]]

    def is_complete() -> bool:
        is_well = {rule["health"] for rule in rules()} == {"ok"}
        return is_well and all(any(name in panel for name in LATER) for panel in empty_panels())

    until(is_complete, "all rules are well, and panels have series but for those that come later", 60.0)
    assert [rule["name"] for rule in rules()] == [rule["alert"] for rule in RULES]
