"""What `flyball doctor` says about RDMA, from the kernel to a WRITE that arrives.

Where `transport = auto`, a host without RDMA uses TCP: what lacks is a warning. With `transport = rdma` it is an error.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ckpt_engine.peers.transport.rdma import verbs
from ckpt_engine.peers.transport.rdma.loopback import LoopbackTry
from ckpt_engine.peers.transport.rdma.port_choice import allowed_ports, split_names
from ckpt_engine.peers.transport.rdma.verbs import RdmaPort, RdmaUnavailable
from ckpt_engine.rules.memory_plan import readable_size
from ckpt_engine.settings import EngineSettings, load_settings
from flyball.cli.doctor.findings import CheckedHost, Finding, Level, not_here, of_error, ok
from flyball.contracts.errors import ConfigurationError, FlyballError, Unreachable
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE

_TRY_BYTES: Final = 1 << 20
_TRY_TIMEOUT_S: Final = 10.0


def pyverbs(host: CheckedHost) -> Iterator[Finding]:
    """Whether this environment can import pyverbs."""
    try:
        found = verbs.load_pyverbs()
    except RdmaUnavailable as error:
        yield _missing("pyverbs", error, host)
    else:
        yield ok("pyverbs", f"imported from {Path(found.errors.__file__).parent}")


def devices(host: CheckedHost) -> Iterator[Finding]:
    """The kernel's RDMA stack, and its devices."""
    try:
        found = verbs.read_ports(host.sysfs)
    except RdmaUnavailable as error:
        yield _missing("rdma devices", error, host)
        return
    there = dict.fromkeys(port.device for port in found)
    yield ok("rdma devices", ", ".join(there))
    wanted = _settings(host).rdma_devices
    unknown = split_names(wanted) - {*there, *(port.name for port in found)}
    if unknown:
        try:
            allowed_ports(found, wanted)
        except RdmaUnavailable as error:
            yield _missing("rdma devices", error, host)
        else:
            detail = f"FLYBALL_CKPT_RDMA_DEVICES names {', '.join(sorted(unknown))}, which this host does not have"
            yield Finding("rdma devices", Level.WARNING, detail, f"correct it; this host has {', '.join(there)}")


def ports(host: CheckedHost) -> Iterator[Finding]:
    """The state of each port that may be used, and its GID."""
    found = _ports(host)
    if found and not any(port.is_active for port in found):
        yield _missing("rdma ports", verbs.port_down(found), host)
        return
    for port in found:
        if port.is_active:
            yield ok("rdma ports", _about(port))
            yield _gid(port, host)
        else:
            yield Finding("rdma ports", Level.WARNING, f"{port.name} is {port.state}", verbs.set_up(port))


def memlock(host: CheckedHost) -> Iterator[Finding]:
    """How much memory a process may register: slots can fill the whole folder of shared memory."""
    if not _ports(host):
        yield ok("memlock", f"{_locked(verbs.memlock_limit())}; nothing but RDMA needs that")
        return
    folder = host.environ.get(SHM_DIR_VARIABLE) or DEFAULT_SHM_DIR
    needed_bytes = shutil.disk_usage(folder).total if Path(folder).is_dir() else _TRY_BYTES
    try:
        verbs.check_memlock(needed_bytes)
    except RdmaUnavailable as error:
        yield _missing("memlock", error, host)
    else:
        yield ok("memlock", _locked(verbs.memlock_limit()))


def _locked(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{readable_size(limit)} may be locked"


def transfers(host: CheckedHost) -> Iterator[Finding]:
    """Memory is registered, and written through each active port from one queue pair to another."""
    ports = _ports(host) if verbs.is_importable() else ()
    if not ports:
        yield not_here("rdma write", "there is no RDMA port to try it on")
    for port in ports:
        if port.is_active and port.gid:
            try:
                with LoopbackTry(port, size_bytes=_TRY_BYTES) as attempt:
                    yield ok("rdma memory", f"{port.name}: {readable_size(2 * _TRY_BYTES)} of shared memory registered")
                    attempt.write(timeout_s=_TRY_TIMEOUT_S)
            except RdmaUnavailable as error:
                yield _missing("rdma memory", error, host)
            except Unreachable as error:
                yield _missing("rdma write", error, host)
            else:
                yield ok("rdma write", f"{port.name}: {readable_size(_TRY_BYTES)} written to itself and compared")


def _ports(host: CheckedHost) -> tuple[RdmaPort, ...]:
    """Those that may be used. Empty if there are none, which `devices` says."""
    try:
        return allowed_ports(verbs.read_ports(host.sysfs), _settings(host).rdma_devices)
    except RdmaUnavailable:
        return ()


def _about(port: RdmaPort) -> str:
    link = "InfiniBand" if port.is_infiniband else f"Ethernet, interface {port.interface or 'unknown'}"
    node = "" if port.numa_node < 0 else f", NUMA node {port.numa_node}"
    return f"{port.name} is {port.state} ({link}{node})"


def _gid(port: RdmaPort, host: CheckedHost) -> Finding:
    if gid := port.gid:
        address = gid.address.ipv4_mapped or gid.address
        return ok("rdma gid", f"{port.name}: GID {gid.index}, {gid.kind}, {address}")
    mend = (
        "ibstat, and restart the subnet manager" if port.is_infiniband else f"ip addr add IP/BITS dev {port.interface}"
    )
    error = ConfigurationError(f"{port.name} has no GID to use: its interface has no address.", hint=mend)
    return of_error("rdma gid", error, _level(host))


def _missing(subject: str, error: FlyballError, host: CheckedHost) -> Finding:
    level = _level(host)
    if level is Level.WARNING and not (host.sysfs / "class" / "infiniband").is_dir():
        return not_here(subject, error.message)
    return of_error(subject, error, level)


def _level(host: CheckedHost) -> Level:
    return Level.ERROR if _settings(host).transport == "rdma" else Level.WARNING


def _settings(host: CheckedHost) -> EngineSettings:
    try:
        return load_settings(host.environ)
    except ConfigurationError:  # `settings` has said it
        return EngineSettings()
