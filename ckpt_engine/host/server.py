"""The checkpoint engine's process: one per host, beside the trainers. It outlives them and the daemon.

    python -P -m ckpt_engine.host.server --state-dir DIR --host-id H --address IP [--port 0] [--token-file F]

It never imports torch. It may be killed at any moment: its state is on disk or in shared memory, and the next engine
resumes from there.
"""

from __future__ import annotations

import argparse
import os
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from flyball.process_start import import_lean

import_lean("structlog")  # before the modules that import it

import structlog  # noqa: E402

from ckpt_engine.host.host_engine import Engine  # noqa: E402
from ckpt_engine.host.state_dir import EngineStateDir  # noqa: E402
from ckpt_engine.settings import load_settings  # noqa: E402
from ckpt_engine.slots import segment_owner  # noqa: E402
from flyball.batch_step import leader_of  # noqa: E402
from flyball.contracts.errors import ConfigurationError, FlyballError  # noqa: E402
from flyball.contracts.identity import check_name  # noqa: E402
from flyball.contracts.on_host.engine_wire import DAEMON_PID_FILE, ENGINE_LOG  # noqa: E402
from flyball.process_start import RotatedStderr, log_to_stderr  # noqa: E402
from flyball.process_title import set_title  # noqa: E402
from flyball.worker_user import find_worker_user  # noqa: E402

log = structlog.get_logger()


def read_token(path: Path | None) -> bytes:
    """The cluster's shared token. Without a file a random one: then no other engine can connect."""
    if path is None:
        log.info("no_token_file", consequence="no other host can connect to this engine")
        return secrets.token_bytes(32)
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"The token file {path} cannot be read: {error.strerror}.", hint="use the file that the supervisor made"
        ) from error
    if not token:
        raise ConfigurationError(f"The token file {path} is empty.", hint="copy the supervisor's token into it")
    return token


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m ckpt_engine.host.server", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True, help="this host's state folder")
    parser.add_argument("--host-id", required=True)
    parser.add_argument("--address", required=True, help="this host's IP address, as other hosts reach it")
    parser.add_argument("--port", type=int, default=0, help="0: the port of the last run, or any free one")
    parser.add_argument("--worker-user", default="", help="user that this host's trainers run as, if it is another one")
    parser.add_argument("--token-file", type=Path, help="file with the token that all hosts of the cluster share")
    return parser.parse_args(arguments)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one: rank 0's engine has two connections to every host of its job."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _await_end(ends: set[signal.Signals], state_dir: Path) -> None:
    """In a step of a batch system, only the daemon of this folder may end its engine by SIGTERM."""
    while True:
        sent = signal.sigwaitinfo(ends)
        if sent.si_signo != signal.SIGTERM or not leader_of(os.environ) or sent.si_pid == _daemon_pid(state_dir):
            return


def _daemon_pid(state_dir: Path) -> int:
    try:
        return int((state_dir / DAEMON_PID_FILE).read_text())
    except (OSError, ValueError):
        return -1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns an exit code of `flyball.contracts.errors`."""
    options = _parse(arguments)
    log_to_stderr(RotatedStderr(options.state_dir / ENGINE_LOG, sys.stderr))
    if arguments is None:
        set_title(f"checkpoint engine {options.host_id}", ["ckpt_engine.host.server", *sys.argv[1:]])
    _raise_descriptor_limit()
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before any thread starts, so that all inherit it
    try:
        segment_owner.serve_workers_of(find_worker_user(options.worker_user))
        engine = Engine(
            EngineStateDir(options.state_dir),
            host_id=check_name("host", options.host_id),
            address=options.address,
            port=options.port,
            token=read_token(options.token_file),
            settings=load_settings(os.environ),
        )
        engine.start()
    except FlyballError as error:
        log.error("engine_not_started", code=error.code, reason=error.message, hint=error.hint)
        return error.exit_code
    _await_end(ends, options.state_dir)
    engine.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
