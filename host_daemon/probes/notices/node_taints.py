"""What Kubernetes says about the node that this daemon's pod runs on: its taints and conditions, from the API server.

The pod needs NODE_NAME (from the downward API) and a service account that may get nodes. Only an answer counts: a
server that is away, or refuses, says nothing.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from datetime import datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.findings import NotAvailableError, ProbeFinding, Reading
from host_daemon.probes.notices.cloud_notices import Notice
from host_daemon.settings import DaemonSettings

ACCOUNT_FOLDER = "var/run/secrets/kubernetes.io/serviceaccount"  # under the root: token, ca.crt
INTERVAL_S = 30.0  # of the conditions: they leave time, and each host asks the API server
TIMEOUT_S = 3.0
MAX_ANSWER_BYTES = 1 << 20  # a node lists the images that it has
_AUTOSCALER = "ToBeDeletedByClusterAutoscaler"

# Taints that say that the node will be taken away -> the time from the taint until then, at the least.
LEAVES: Mapping[str, float] = {
    _AUTOSCALER: 60.0,  # its value is the moment; pods get their grace after that
    "cloud.google.com/impending-node-termination": 25.0,  # of the 30 s that GKE has before a preemption
    "aws-node-termination-handler/spot-itn": 110.0,  # of the 120 s of a spot interruption notice
    "aws-node-termination-handler/asg-lifecycle-termination": 60.0,
    "karpenter.sh/disrupted": 60.0,
    "karpenter.sh/disruption": 60.0,  # its name before v1
    "node.kubernetes.io/out-of-service": 0.0,
}
# Taints for which ranks should leave while there is time, or which are on record. Those of a node that is not ready or
# unreachable are left out: the sensors see for themselves whether the host is.
TAINTS: Mapping[str, Severity] = {
    "node.kubernetes.io/unschedulable": Severity.WARNING,  # kubectl cordon, or the begin of a drain
    "aws-node-termination-handler/scheduled-maintenance": Severity.WARNING,
    "aws-node-termination-handler/rebalance-recommendation": Severity.WARNING,
    "DeletionCandidateOfClusterAutoscaler": Severity.INFO,
}
# Conditions that a node should not have. Those of the kubelet (Ready, MemoryPressure, DiskPressure) are left out: the
# daemon sees for itself what they are about.
CONDITIONS: Mapping[str, Severity] = {
    "KernelDeadlock": Severity.WARNING,
    "ReadonlyFilesystem": Severity.WARNING,
    "VMEventScheduled": Severity.WARNING,  # AKS: the cloud is about to reboot, redeploy or take the machine
}


def notice_of(node: Mapping[str, Any], now: float) -> Notice | None:
    """The notice that a node's taints give, the most urgent one."""
    found = []
    for taint in _taints(node):
        notice_s = LEAVES.get(taint["key"])
        if notice_s is not None:
            deadline_at = max(now, _added_at(taint, now) + notice_s)
            found.append(Notice(deadline_at, f"kubernetes taint {taint['key']}"))
    return min(found, key=lambda notice: notice.deadline_at, default=None)


def findings_of(node: Mapping[str, Any]) -> tuple[ProbeFinding, ...]:
    """The conditions of the host that a node's taints and conditions are."""
    found = []
    for taint in _taints(node):
        severity = TAINTS.get(taint["key"])
        if severity is not None:
            message = f"Its Kubernetes node has the taint {taint['key']}."
            found.append(ProbeFinding("node-taint", severity, message, taint["key"]))
    status = node.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    for condition in conditions if isinstance(conditions, list) else []:
        if not isinstance(condition, dict) or condition.get("status") != "True":
            continue
        kind = str(condition.get("type"))
        if kind in CONDITIONS:
            message = f"Its Kubernetes node has the condition {kind}: {condition.get('message') or 'no message'}."
            found.append(ProbeFinding("node-condition", CONDITIONS[kind], message, kind))
    return tuple(found)


class NodeApi:
    """Gets this pod's node. Blocks; call it in a thread."""

    def __init__(self, name: str, url: str, root: Path = Path("/")) -> None:
        """`root`: what stands for / in tests."""
        self._name = name
        self._url = url
        self._account = root / ACCOUNT_FOLDER

    def node(self) -> Mapping[str, Any]:
        """Raises NotAvailableError."""
        if not self._url or not self._name:
            lacks = "KUBERNETES_SERVICE_HOST is not set" if not self._url else "NODE_NAME is not set (downward API)"
            raise NotAvailableError(f"not in a Kubernetes pod that knows its node: {lacks}")
        try:
            token = (self._account / "token").read_text().strip()  # it is renewed every hour or so
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise NotAvailableError(f"the pod's service account cannot be read: {error}") from error
        address = urlsplit(self._url)
        connection = HTTPSConnection(address.hostname or "", address.port or 443, timeout=TIMEOUT_S, context=context)
        try:  # version 0: from the server's cache, which costs it next to nothing
            path = f"/api/v1/nodes/{quote(self._name, safe='')}?resourceVersion=0"
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            status, body = response.status, response.read(MAX_ANSWER_BYTES)
        except (OSError, HTTPException) as error:
            raise NotAvailableError(f"the Kubernetes API server does not answer: {error}") from error
        finally:
            connection.close()
        if status in (401, 403):
            raise NotAvailableError(
                f"the Kubernetes API server answers {status}: the pod's service account may not get nodes. Next step: "
                "bind it to a ClusterRole with the verb get on nodes"
            )
        if status != 200:
            raise NotAvailableError(f"the Kubernetes API server answers {status} about node {self._name}")
        try:
            found = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise NotAvailableError(f"the Kubernetes API server's answer is no JSON: {error}") from error
        return found if isinstance(found, dict) else {}


def api_of(settings: DaemonSettings) -> NodeApi:
    """The API server as the settings name it."""
    return NodeApi(settings.node_name, settings.kubernetes_url, settings.probe_root)


class NodeNotices:
    """The notices of this pod's node."""

    def __init__(self, api: NodeApi) -> None:
        self._api = api

    def check(self, now: float) -> Notice | None:
        """Raises NotAvailableError if nobody can be asked."""
        return notice_of(self._api.node(), now)


class NodeTaints:
    """The probe of this pod's node."""

    source = "probe node"
    deadline_s = 10.0
    interval_s = INTERVAL_S

    def __init__(self, api: NodeApi) -> None:
        self._api = api

    def read(self) -> Reading:
        return Reading(findings_of(self._api.node()))


def _taints(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = node.get("spec")
    taints = spec.get("taints") if isinstance(spec, dict) else None
    found = taints if isinstance(taints, list) else []
    return [taint for taint in found if isinstance(taint, dict) and isinstance(taint.get("key"), str)]


def _added_at(taint: Mapping[str, Any], now: float) -> float:
    """When the taint was added, as far as it says so; no later than now."""
    value, added = str(taint.get("value") or ""), taint.get("timeAdded")
    if taint["key"] == _AUTOSCALER and value.isdecimal():
        return min(float(value), now)
    try:
        return min(datetime.fromisoformat(str(added).replace("Z", "+00:00")).timestamp(), now)
    except ValueError:
        return now
