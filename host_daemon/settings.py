"""What the daemon is told: flags, or FLYBALL_* environment variables, of which flags win."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from flyball.contracts.errors import ConfigurationError, UsageError
from flyball.contracts.identity import check_name
from flyball.contracts.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE


class DaemonSettings(msgspec.Struct, frozen=True):
    """Everything that differs from host to host."""

    state_dir: Path
    host_id: str
    supervisor_url: str
    token_file: Path
    token: str
    address: str = "127.0.0.1"
    failure_domain: str = ""
    report_interval_s: float = 1.0
    shm_dir: str = DEFAULT_SHM_DIR
    warm_nproc: int = 0  # have a warm standby for jobs of this many workers per host before one comes; 0: none

    def __repr__(self) -> str:
        return f"DaemonSettings(host_id={self.host_id!r}, supervisor_url={self.supervisor_url!r})"  # never the token


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", hint="python -m host_daemon --help shows all flags")


def parse_settings(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> DaemonSettings:
    """Settings from the command line. Raises UsageError or ConfigurationError."""
    parser = _Parser(prog="host_daemon", description="The Flyball agent of one training host.")
    for name, about in (
        ("state-dir", "folder for what must survive a restart (0700)"),
        ("host-id", "stable name of this host"),
        ("supervisor", "URL of the supervisor"),
        ("token-file", "file with the token of the supervisor"),
        ("address", "IP address at which other hosts reach this one"),
        ("failure-domain", "rack or switch; hosts of one domain are expected to fail together"),
        ("report-interval-s", "seconds between reports when nothing happens"),
        ("warm-nproc", "workers per host of the jobs that a warm standby is kept for before one comes; 0: none"),
    ):
        parser.add_argument(f"--{name}", default=environ.get(f"FLYBALL_{name.replace('-', '_').upper()}"), help=about)
    given = parser.parse_args(list(arguments))
    for required in ("state_dir", "supervisor", "token_file"):
        if not getattr(given, required):
            flag = f"--{required.replace('_', '-')}"
            raise UsageError(f"{flag} is missing.", hint=f"give it, or set FLYBALL_{required.upper()}")
    if not re.fullmatch(r"https?://[^/\s]+/?", given.supervisor):
        raise UsageError(f"--supervisor {given.supervisor} is no URL.", hint="for example http://10.0.0.1:7370")
    token_file = Path(given.token_file).absolute()
    return DaemonSettings(
        state_dir=Path(given.state_dir).resolve(),
        host_id=check_name("The host", given.host_id or socket.gethostname().lower()),
        supervisor_url=given.supervisor.rstrip("/"),
        token_file=token_file,
        token=_read_token(token_file),
        address=given.address or "127.0.0.1",
        failure_domain=given.failure_domain or "",
        report_interval_s=_interval(given.report_interval_s or "1.0"),
        shm_dir=environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR,
        warm_nproc=_count(given.warm_nproc or "0"),
    )


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(
            f"The token file {path} cannot be read: {error.strerror}.",
            hint="copy the file `token` of the supervisor's state folder to this host",
        ) from error
    if not token:
        raise ConfigurationError(f"The token file {path} is empty.", hint="copy the supervisor's token into it")
    return token


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 60.0:
        raise UsageError(f"--report-interval-s {text} is not between 0.05 and 60.", hint="1.0 is the default")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--warm-nproc {text} is not a number of workers.", hint="0 is the default")
    return int(text)
