"""Notices of the clouds that a host will be taken away, from their metadata services.

The formats are the documented ones: EC2's spot/instance-action, GCE's preempted and maintenance-event, Azure's
scheduled events. Only an answer counts: a service that is away says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from host_daemon.probes.findings import NotAvailableError

Cloud: TypeAlias = Literal["aws", "gce", "azure"]
CLOUDS: tuple[Cloud, ...] = ("aws", "gce", "azure")
METADATA_URLS: Mapping[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gce": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
GCE_PREEMPTION_S = 30.0  # from ACPI G2 to G3, as documented
GCE_MAINTENANCE_S = 60.0  # of warning at the least for TERMINATE_ON_HOST_MAINTENANCE
TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 64 << 10
_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_LEAVES = frozenset({"Reboot", "Redeploy", "Preempt", "Terminate"})


class Notice(msgspec.Struct, frozen=True):
    """`deadline_at`: wall clock, seconds since 1970."""

    deadline_at: float
    source: str


def aws_notice(text: str) -> Notice | None:
    """The answer of spot/instance-action: `{"action": "terminate", "time": "2026-09-18T08:22:00Z"}`."""
    found = _json(text)
    if not isinstance(found, dict) or found.get("action") not in ("terminate", "stop", "hibernate"):
        return None
    at = _moment(found.get("time"))
    return Notice(at, f"aws spot {found['action']}") if at is not None else None


def gce_notice(preempted: str, maintenance: str, now: float) -> Notice | None:
    """The answers of instance/preempted (TRUE, FALSE) and instance/maintenance-event (NONE, TERMINATE_...)."""
    if preempted.strip() == "TRUE":
        return Notice(now + GCE_PREEMPTION_S, "gce preemption")
    if maintenance.strip() == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice(now + GCE_MAINTENANCE_S, "gce host maintenance")
    return None


def azure_notice(text: str, machine: str, now: float) -> Notice | None:
    """The answer of metadata/scheduledevents: events that name this machine. An event that has started, or has no
    time, is due now."""
    found = _json(text)
    events = found.get("Events", []) if isinstance(found, dict) else []
    due = []
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict) or event.get("EventType") not in _AZURE_LEAVES:
            continue
        if machine and machine not in (event.get("Resources") or []):
            continue
        at = _moment(event.get("NotBefore")) if event.get("EventStatus") == "Scheduled" else None
        due.append(Notice(now if at is None else at, f"azure {str(event['EventType']).lower()}"))
    return min(due, key=lambda notice: notice.deadline_at, default=None)


class CloudNotices:
    """Asks one cloud's metadata service. Blocks; call it in a thread."""

    def __init__(self, cloud: Cloud, url: str = "") -> None:
        self._cloud = cloud
        self._url = url or METADATA_URLS[cloud]
        self._token = ""

    def check(self, now: float) -> Notice | None:
        """Raises NotAvailableError if the service does not answer."""
        match self._cloud:
            case "aws":
                return self._aws()
            case "gce":
                root, flavor = "/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
                preempted = self._text("GET", f"{root}/preempted", flavor)
                return gce_notice(preempted, self._text("GET", f"{root}/maintenance-event", flavor), now)
            case "azure":
                header = {"Metadata": "true"}
                name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
                machine = self._text("GET", name, header).strip()
                return azure_notice(self._text("GET", _AZURE_EVENTS, header), machine, now)

    def _aws(self) -> Notice | None:
        if not self._token:
            self._token = self._text("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"})
        header = {"X-aws-ec2-metadata-token": self._token}
        path = "/latest/meta-data/spot/instance-action"
        status, text = self._ask("GET", path, header)
        if status == 404:
            return None  # no notice
        if status == 401:  # the token ran out: the next look gets another
            self._token = ""
        return aws_notice(self._text_of(status, text, path))

    def _text(self, method: str, path: str, headers: Mapping[str, str]) -> str:
        return self._text_of(*self._ask(method, path, headers), path)

    def _text_of(self, status: int, text: str, path: str) -> str:
        if status != 200:
            raise NotAvailableError(f"the metadata service of {self._cloud} answers {status} to {path}")
        return text

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        address = urlsplit(self._url)
        connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read(MAX_ANSWER_BYTES).decode(errors="replace")
        except (OSError, HTTPException) as error:
            raise NotAvailableError(f"the metadata service of {self._cloud} does not answer: {error}") from error
        finally:
            connection.close()


def _json(text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return None


def _moment(text: object) -> float | None:
    """EC2 writes ISO 8601, Azure the format of HTTP dates."""
    if not isinstance(text, str) or not text:
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        try:
            found = parsedate_to_datetime(text)
        except ValueError:
            return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
