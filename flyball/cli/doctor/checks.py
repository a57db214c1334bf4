"""The checks of `flyball doctor`, in the order in which they are shown. A new one is a function and a row of CHECKS."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from ckpt_engine.rules.memory_plan import readable_size
from ckpt_engine.settings import check_variables, load_settings
from ckpt_engine.slots.memory_limits import available_memory
from flyball import __version__
from flyball.cli.doctor import rdma_checks
from flyball.cli.doctor.findings import Check, CheckedHost, Finding, ok
from flyball.cli.reach.places import state_root
from flyball.cli.reach.sources import SupervisorChoice
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE
from flyball.state_folder import clear_errors
from host_daemon.probes.host_needs import check_disk, check_shm
from host_daemon.probes.probing import availability
from host_daemon.probes.suite import REAL_ROOT, probes_of
from host_daemon.settings import CONDITIONS_FOLDER


def python(_: CheckedHost) -> Iterator[Finding]:
    """Python and PyTorch, which is not imported: that takes seconds."""
    try:
        torch = version("torch")
    except PackageNotFoundError as error:
        raise ConfigurationError("PyTorch is not installed in this environment.", hint="pip install torch") from error
    yield ok("python", f"Python {platform.python_version()}, PyTorch {torch}, Flyball {__version__}")


def settings(host: CheckedHost) -> Iterator[Finding]:
    """The checkpoint settings of the environment, and of the file that it names."""
    check_variables(host.environ)
    load_settings(host.environ)
    yield ok("settings", "the checkpoint settings of this environment are valid")


def shared_memory(host: CheckedHost) -> Iterator[Finding]:
    """Room for the slots, by what limits it."""
    folder = host.environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR
    check_shm(Path(folder))
    what, size_bytes = min(available_memory(folder).items(), key=lambda limit: limit[1])
    yield ok("shared memory", f"{readable_size(size_bytes)} free for checkpoints, limited by {what}")


def state_folder(host: CheckedHost) -> Iterator[Finding]:
    """The folder that Flyball would make its state folders in; nothing is made."""
    root = state_root(host.environ)
    folder = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    hint = "set FLYBALL_STATE_DIR to a folder that you may write to"
    with clear_errors(root, hint=hint), tempfile.TemporaryFile(dir=folder):
        pass
    check_disk(folder)
    yield ok("state folder", f"{root} is writable")


def supervisor(host: CheckedHost) -> Iterator[Finding]:
    """The supervisor that the environment names."""
    if host.environ.get("FLYBALL_SUPERVISOR"):
        with SupervisorChoice().connect() as client:
            client.newest("/v1/jobs", 1)
            yield ok("supervisor", f"{client.url} answers and accepts the token")


def database(host: CheckedHost) -> Iterator[Finding]:
    """The database that the environment names."""
    url = host.environ.get("FLYBALL_DATABASE_URL")
    if url:
        from sqlalchemy import text

        from services.store.sql.database import open_existing

        opened = open_existing(url)
        try:
            with opened.read() as connection:
                connection.execute(text("SELECT 1"))
        finally:
            opened.close()
        yield ok("database", f"{opened.name} answers")


def probes(host: CheckedHost) -> Iterator[Finding]:
    """What a daemon on this host could watch."""
    folder = next(folder for folder in (state_root(host.environ), Path("/")) if folder.exists())
    made = probes_of(REAL_ROOT, 5.0, folder / CONDITIONS_FOLDER, SystemClock(), lambda: {"the state folder": folder})
    for probe in made:
        why = availability(probe)
        yield ok(probe.source, f"not available here: {why}" if why else "works here")


CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("python", python),
    ("settings", settings),
    ("shared memory", shared_memory),
    ("state folder", state_folder),
    ("supervisor", supervisor),
    ("database", database),
    ("probes", probes),
    ("pyverbs", rdma_checks.pyverbs),
    ("rdma devices", rdma_checks.devices),
    ("rdma ports", rdma_checks.ports),
    ("memlock", rdma_checks.memlock),
    ("rdma", rdma_checks.transfers),
)
