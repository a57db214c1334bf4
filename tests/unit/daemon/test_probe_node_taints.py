"""Taints and conditions of a Kubernetes node, over real TLS from a server on this machine."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.reports.conditions import Severity
from flyball.contracts.reports.signals import PreemptionNotice
from host_daemon.probes.findings import NotAvailableError
from host_daemon.probes.notices import node_taints
from host_daemon.probes.notices.cloud_notices import Notice
from host_daemon.probes.notices.node_taints import (
    ACCOUNT_FOLDER,
    NodeApi,
    NodeNotices,
    NodeTaints,
    findings_of,
    notice_of,
)
from host_daemon.probes.notices.notice_watch import Notices
from host_daemon.settings import parse_settings
from host_daemon.store.database import HostDatabase
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import SignalOutbox

NOW = 1_789_719_000.0


def node(*taints: dict[str, Any], conditions: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """As `kubectl get node -o json` shows one, shortened."""
    healthy = {
        "lastHeartbeatTime": "2026-09-18T08:05:31Z",
        "lastTransitionTime": "2026-09-18T06:00:02Z",
        "message": "kubelet is posting ready status",
        "reason": "KubeletReady",
        "status": "True",
        "type": "Ready",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "gpu-7", "labels": {"kubernetes.io/hostname": "gpu-7"}, "resourceVersion": "88123"},
        "spec": {
            "providerID": "kind://docker/k/gpu-7",
            **({"taints": list(taints)} if taints else {}),
        },
        "status": {"conditions": [healthy, *conditions], "images": []},
    }


def taint(key: str, value: str = "", effect: str = "NoSchedule", **more: str) -> dict[str, Any]:
    return {"effect": effect, "key": key, **({"value": value} if value else {}), **more}


GPU = taint("nvidia.com/gpu", "present")


@pytest.mark.parametrize(
    ("found", "deadline_at"),
    [
        (taint("ToBeDeletedByClusterAutoscaler", str(int(NOW) - 10)), NOW + 50),
        (taint("ToBeDeletedByClusterAutoscaler", str(int(NOW) - 600)), NOW),  # its time is over: it may go any moment
        (taint("ToBeDeletedByClusterAutoscaler", "9999999999"), NOW + 60),  # a clock that is ahead
        (taint("cloud.google.com/impending-node-termination"), NOW + 25),
        (taint("aws-node-termination-handler/spot-itn", "1234567890"), NOW + 110),  # the event, and no moment
        (taint("aws-node-termination-handler/spot-itn", "spot-itn-3f1c"), NOW + 110),
        (taint("aws-node-termination-handler/asg-lifecycle-termination", "asg-1"), NOW + 60),
        (taint("karpenter.sh/disrupted"), NOW + 60),
        (taint("karpenter.sh/disruption", "disrupting"), NOW + 60),
        (
            taint("node.kubernetes.io/out-of-service", "nodeshutdown", "NoExecute", timeAdded="2026-09-18T08:00:00Z"),
            NOW,
        ),
    ],
)
def test_taints_that_are_notices(found: dict[str, Any], deadline_at: float) -> None:
    assert notice_of(node(GPU, found), NOW) == Notice(deadline_at, f"kubernetes taint {found['key']}")
    assert findings_of(node(found)) == ()


@pytest.mark.parametrize(
    ("found", "severity"),
    [
        (taint("node.kubernetes.io/unschedulable"), Severity.WARNING),
        (taint("aws-node-termination-handler/scheduled-maintenance", "system-reboot"), Severity.WARNING),
        (taint("aws-node-termination-handler/rebalance-recommendation", "rebalance"), Severity.WARNING),
        (taint("DeletionCandidateOfClusterAutoscaler", "1789718000", "PreferNoSchedule"), Severity.INFO),
        (taint("node.kubernetes.io/not-ready", effect="NoExecute", timeAdded="2026-09-18T08:00:00Z"), None),
        (taint("node.kubernetes.io/unreachable", effect="NoExecute", timeAdded="2026-09-18T08:00:00Z"), None),
        (taint("node.kubernetes.io/disk-pressure"), None),
        (GPU, None),
    ],
)
def test_taints_that_are_conditions_or_nothing(found: dict[str, Any], severity: Severity | None) -> None:
    seen = [(finding.severity, finding.subject) for finding in findings_of(node(found))]
    assert seen == ([(severity, found["key"])] if severity is not None else [])
    assert notice_of(node(found), NOW) is None


@pytest.mark.parametrize(
    ("kind", "status", "is_seen"),
    [
        ("KernelDeadlock", "True", True),
        ("KernelDeadlock", "False", False),
        ("VMEventScheduled", "Unknown", False),
        ("ReadonlyFilesystem", "True", True),
        ("MemoryPressure", "True", False),
    ],
)
def test_conditions_of_a_node(kind: str, status: str, is_seen: bool) -> None:
    condition = {"type": kind, "status": status, "message": "task docker:7 blocked for more than 120 seconds"}
    found = findings_of(node(conditions=(condition,)))
    assert [(one.kind, one.subject) for one in found] == [("node-condition", kind)] * is_seen


@pytest.mark.parametrize(
    "odd", [{}, {"spec": None}, {"spec": {"taints": "x"}}, {"spec": {"taints": [None, {"key": 3}]}}]
)
def test_odd_answers_say_nothing(odd: dict[str, Any]) -> None:
    assert notice_of(odd, NOW) is None and findings_of({**odd, "status": {"conditions": [7]}}) == ()


def test_outside_a_pod_the_probe_says_so() -> None:
    for name, url, lacks in (("gpu-7", "", "KUBERNETES_SERVICE_HOST"), ("", "https://10.96.0.1:443", "NODE_NAME")):
        with pytest.raises(NotAvailableError, match=f"not in a Kubernetes pod that knows its node: {lacks}"):
            NodeTaints(NodeApi(name, url)).read()


class ApiServer:
    """Answers about one node to who has the token."""

    def __init__(self, root: Path) -> None:
        self.node = node()
        self.status = 200
        self.asked: list[str] = []
        folder = root / ACCOUNT_FOLDER
        folder.mkdir(parents=True)
        key, certificate = root / "key.pem", folder / "ca.crt"
        subject = ("-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1")
        made = ("req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *subject)
        subprocess.run(["openssl", *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        self.token = secrets.token_hex(16)
        (folder / "token").write_text(f"{self.token}\n")
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.asked.append(self.path)
                is_allowed = self.headers["Authorization"] == f"Bearer {api.token}"
                self.send_response(api.status if is_allowed else 401)
                self.end_headers()
                self.wfile.write(json.dumps(api.node).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl is installed")
    made = ApiServer(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.processes
def test_the_node_is_read_with_the_pods_account(server: ApiServer, tmp_path: Path) -> None:
    api = NodeApi("gpu-7", server.url, tmp_path)
    assert NodeNotices(api).check(NOW) is None and NodeTaints(api).read().states == ()
    assert set(server.asked) == {"/api/v1/nodes/gpu-7?resourceVersion=0"}
    server.node = node(taint("karpenter.sh/disrupted"), taint("node.kubernetes.io/unschedulable"))
    assert NodeNotices(api).check(NOW) == Notice(NOW + 60, "kubernetes taint karpenter.sh/disrupted")
    assert [finding.subject for finding in NodeTaints(api).read().states] == ["node.kubernetes.io/unschedulable"]
    server.status = 403
    with pytest.raises(NotAvailableError, match="may not get nodes"):
        api.node()
    server.status = 404
    with pytest.raises(NotAvailableError, match="answers 404 about node gpu-7"):
        api.node()
    server.status, server.node = 200, []  # type: ignore[assignment]  # no node
    assert NodeNotices(api).check(NOW) is None
    (tmp_path / ACCOUNT_FOLDER / "token").write_text("another")
    with pytest.raises(NotAvailableError, match="answers 401"):
        api.node()


@pytest.mark.processes
def test_a_server_that_is_away_slow_or_another_is_not_available(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotAvailableError, match="does not answer"):
        NodeApi(
            "gpu-7", server.url.replace("127.0.0.1", "localhost"), tmp_path
        ).node()  # the certificate is not its own
    monkeypatch.setattr(node_taints, "TIMEOUT_S", 0.1)
    silent = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # accepts nothing: nobody serves
    try:
        with pytest.raises(NotAvailableError, match="does not answer"):
            NodeApi("gpu-7", f"https://127.0.0.1:{silent.server_port}", tmp_path).node()
    finally:
        silent.server_close()
    shutil.rmtree(tmp_path / ACCOUNT_FOLDER)
    with pytest.raises(NotAvailableError, match="service account cannot be read"):
        NodeApi("gpu-7", server.url, tmp_path).node()


@pytest.mark.processes
def test_a_taint_is_signalled_once_and_withdrawn_with_it(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host_daemon.probes.notices.notice_watch.NODE_INTERVAL_S", 0.01)
    (tmp_path / "token").write_text(secrets.token_hex(32))
    words = ("--state-dir", str(tmp_path), "--host-id", "a", "--supervisor", "http://127.0.0.1:1")
    pod = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server.server_port)}
    environ = {**pod, "NODE_NAME": "gpu-7", "FLYBALL_PROBE_ROOT": str(tmp_path)}
    settings = parse_settings([*words, "--token-file", str(tmp_path / "token")], environ)
    database = HostDatabase(tmp_path / "daemon.sqlite")
    outbox = SignalOutbox(database, SystemClock(), source="a", incarnation="i1")
    told: dict[int, PreemptionNotice] = {}

    async def watch() -> None:
        watched = Notices(
            settings,
            tmp_path / "notice.json",
            facts=Facts(database),
            outbox=outbox,
            clock=SystemClock(),
            wake=lambda: None,
        )
        loop = asyncio.create_task(watched.run())

        async def until(is_reached: Callable[[], bool]) -> None:
            while not is_reached():
                assert not loop.done(), loop.result()
                told.update({s.seq: s.body for s in outbox.due() if isinstance(s.body, PreemptionNotice)})
                await asyncio.sleep(0.005)

        async with asyncio.timeout(30.0):
            server.node = node(taint("karpenter.sh/disrupted"))
            await until(lambda: len(told) == 1)
            asked = len(server.asked)
            await until(lambda: len(server.asked) > asked + 3)
            server.node = node()
            await until(lambda: len(told) == 2)
        loop.cancel()

    asyncio.run(watch())
    database.close()
    first, second = told.values()
    assert first.source == second.source == "kubernetes taint karpenter.sh/disrupted"
    assert first.deadline_at > 0.0 and second.deadline_at == 0.0, "withdrawn"
