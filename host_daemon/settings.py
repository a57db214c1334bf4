"""The daemon's settings: flags, or FLYBALL_* environment variables. Flags win."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from flyball.client_tls import ClientTls
from flyball.contracts.credentials import HostCredential, read_credential
from flyball.contracts.errors import ConfigurationError, UsageError
from flyball.contracts.identity import check_name
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE
from flyball.worker_user import WorkerUser, find_worker_user

MAX_LABEL_LENGTH = 128  # the limit of a report
CONDITIONS_FOLDER = "conditions"  # in the state folder
CLOUDS = ("aws", "gce", "azure")


class DaemonSettings(msgspec.Struct, frozen=True):
    """Everything that differs between hosts."""

    state_dir: Path
    host_id: str
    sensor_urls: tuple[str, ...]
    actuator_urls: tuple[str, ...]
    token_file: Path
    credential: HostCredential
    tls: ClientTls = ClientTls()
    address: str = "127.0.0.1"
    failure_domain: str = ""
    fabric: str = ""
    report_interval_s: float = 1.0
    shm_dir: str = DEFAULT_SHM_DIR
    leave_timeout_s: float = 15.0  # after SIGTERM, for the ranks to move elsewhere
    probe_root: Path = Path("/")  # a folder of recorded readings in its place, for tests
    probe_interval_s: float = 5.0  # between two looks at GPUs, links, disks and memory
    conditions_dir: Path = Path("/nonexistent")  # where others put conditions of this host, one file each
    cloud_notices: str = ""  # whose metadata service announces that the host is taken away; '': nobody's
    metadata_url: str = ""  # of that service, if it is not at the usual address
    node_name: str = ""  # of the Kubernetes node that this pod runs on; '': not known
    kubernetes_url: str = ""  # of the API server; '': not in a pod
    worker_user: WorkerUser | None = None  # whose the workers are; None: the daemon's user's
    logs_text: bool = True  # on a terminal; else, and everywhere without, JSON
    warm_nproc: int = 0  # keep a standby ready for jobs of this many workers per host, before one comes; 0: none

    def __repr__(self) -> str:
        return f"DaemonSettings(host_id={self.host_id!r}, sensor_urls={self.sensor_urls!r})"  # never the token


# What a flag or a variable sets, and what help and the documentation say about it.
VALUE_FLAGS = (
    ("state-dir", "folder for what must survive a restart (0700)"),
    ("host-id", "stable name of this host (default: its host name)"),
    ("token-file", "file with this host's token, or with the cluster's"),
    ("ca-file", "PEM file of the authority that signed the supervisor's certificate"),
    ("client-cert-file", "PEM file of this host's certificate, for a supervisor that asks for one"),
    ("client-key-file", "PEM file of that certificate's key"),
    ("address", "IP address at which other hosts reach this one"),
    ("failure-domain", "rack or switch; hosts of one domain are expected to fail together"),
    ("fabric", "network in which hosts reach each other fast; spares come from it first"),
    ("report-interval-s", "seconds between reports when nothing happens"),
    ("leave-timeout-s", "seconds that SIGTERM waits until the ranks train elsewhere; 0: do not wait"),
    ("probe-interval-s", "seconds between two looks at GPUs, links, disks and memory"),
    ("conditions-dir", "folder in which others report conditions of this host (default: conditions, in --state-dir)"),
    ("cloud-notices", "watch the metadata service of aws, gce or azure for the end of this host"),
    ("metadata-url", "that service's address, if it is not the usual one"),
    ("worker-user", "user that workers run as; needs a daemon that runs as root"),
    ("warm-nproc", "keep a warm standby for jobs of this many workers per host, before one comes; 0: none"),
    ("log-format", "json: also on a terminal (default: text there, else JSON)"),
)
URL_FLAGS = (
    ("supervisor", "URL of the supervisor; several of one cluster with commas, or one by one"),
    ("sensor-urls", "where to report, if not to the supervisor"),
    ("actuator-urls", "where to ask for commands, if not the supervisor"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", hint="python -m host_daemon --help shows all flags")


def parse_settings(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> DaemonSettings:
    """Parse the command line. Raises UsageError or ConfigurationError."""
    parser = _Parser(prog="host_daemon", description="The Flyball agent of one training host.")
    for name, about in VALUE_FLAGS:
        parser.add_argument(f"--{name}", default=environ.get(f"FLYBALL_{name.replace('-', '_').upper()}"), help=about)
    for name, about in URL_FLAGS:
        parser.add_argument(f"--{name}", action="append", help=about)
    given = parser.parse_args(list(arguments))
    urls = {
        name: _urls(name, getattr(given, name) or [environ.get(f"FLYBALL_{name.upper()}", "")])
        for name in ("supervisor", "sensor_urls", "actuator_urls")
    }
    given.supervisor = urls["supervisor"] or (urls["sensor_urls"] and urls["actuator_urls"])
    for required in ("state_dir", "supervisor", "token_file"):
        if not getattr(given, required):
            flag = f"--{required.replace('_', '-')}"
            raise UsageError(f"{flag} is missing.", hint=f"give it, or set FLYBALL_{required.upper()}")
    token_file = Path(given.token_file).absolute()
    host_id = check_name("The host", given.host_id or socket.gethostname().lower())
    state_dir = Path(given.state_dir).resolve()
    return DaemonSettings(
        state_dir=state_dir,
        host_id=host_id,
        sensor_urls=urls["sensor_urls"] or urls["supervisor"],
        actuator_urls=urls["actuator_urls"] or urls["supervisor"],
        token_file=token_file,
        credential=read_token_file(token_file, host_id),
        tls=_tls(ClientTls(given.ca_file or "", given.client_cert_file or "", given.client_key_file or "")),
        address=given.address or "127.0.0.1",
        failure_domain=_label("failure-domain", given.failure_domain or "", "a rack or a switch"),
        fabric=_label("fabric", given.fabric or "", "the name of a network"),
        report_interval_s=_seconds("report-interval-s", given.report_interval_s or "1.0", 0.05, 60.0),
        leave_timeout_s=_seconds("leave-timeout-s", given.leave_timeout_s or "15.0", 0.0, 3600.0),
        probe_root=Path(environ.get("FLYBALL_PROBE_ROOT") or "/"),
        probe_interval_s=_seconds("probe-interval-s", given.probe_interval_s or "5.0", 0.1, 3600.0),
        conditions_dir=Path(given.conditions_dir).absolute() if given.conditions_dir else state_dir / CONDITIONS_FOLDER,
        cloud_notices=_cloud(given.cloud_notices or ""),
        metadata_url=_urls("metadata-url", [given.metadata_url or ""])[0] if given.metadata_url else "",
        node_name=environ.get("NODE_NAME", ""),
        kubernetes_url=_kubernetes(environ),
        shm_dir=environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR,
        worker_user=find_worker_user(given.worker_user or ""),
        warm_nproc=_count(given.warm_nproc or "0"),
        logs_text=_log_format(given.log_format or "text") == "text",
    )


def _urls(name: str, values: Sequence[str]) -> tuple[str, ...]:
    urls = [url.strip() for value in values for url in value.split(",") if url.strip()]
    for url in urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            raise UsageError(f"--{name.replace('_', '-')} {url} is no URL.", hint="for example http://10.0.0.1:7370")
    return tuple(dict.fromkeys(url.rstrip("/") for url in urls))


def _tls(tls: ClientTls) -> ClientTls:
    tls.context()  # report an unusable file now, not at the first connection
    return tls


def read_token_file(path: Path, host_id: str) -> HostCredential:
    """Read this host's credential. Raises ConfigurationError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The token file {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}.",
            hint=f"write one with `flyball token host {host_id}`, and copy it to this host",
        ) from error
    try:
        return read_credential(text, host_id)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error.message}", hint=error.hint) from error


def _log_format(value: str) -> str:
    if value not in ("text", "json"):
        raise UsageError(f"--log-format {value} is neither text nor json.", hint="leave it out, or choose one")
    return value


def _cloud(name: str) -> str:
    if name and name not in CLOUDS:
        raise UsageError(f"--cloud-notices {name} is no cloud that Flyball knows.", hint=f"one of {', '.join(CLOUDS)}")
    return name


def _kubernetes(environ: Mapping[str, str]) -> str:
    """The API server, as Kubernetes names it to every pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def _label(flag: str, text: str, what: str) -> str:
    if len(text) > MAX_LABEL_LENGTH:
        raise UsageError(f"--{flag} has {len(text)} characters.", hint=f"at most {MAX_LABEL_LENGTH}: {what}")
    return text


def _seconds(flag: str, text: str, least: float, most: float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= most:
        raise UsageError(f"--{flag} {text} is not between {least:g} and {most:g}.", hint=f"leave --{flag} out")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--warm-nproc {text} is not a number of workers.", hint="0 is the default")
    return int(text)
