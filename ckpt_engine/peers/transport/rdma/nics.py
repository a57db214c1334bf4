"""The RDMA devices of this host: opened when they are first needed, and used in turn."""

from __future__ import annotations

import functools
import itertools
import threading
from pathlib import Path
from typing import Final

import structlog

from ckpt_engine.contracts.peer_wire import QueuePairEndpoint
from ckpt_engine.counters import Counters
from ckpt_engine.peers.transport.port import ByteCounters, Connection
from ckpt_engine.peers.transport.rdma.completion_errors import DeviceLost, DeviceRefused, QueuePairError
from ckpt_engine.peers.transport.rdma.connection import RdmaConnection
from ckpt_engine.peers.transport.rdma.device import OpenDevice
from ckpt_engine.peers.transport.rdma.host_topology import connected_networks, gpu_numa_nodes
from ckpt_engine.peers.transport.rdma.port_choice import Networks, allowed_ports, choose_port
from ckpt_engine.peers.transport.rdma.queue_pair import QueuePair
from ckpt_engine.peers.transport.rdma.verbs import (
    SYSFS,
    RdmaPort,
    RdmaUnavailable,
    Refusal,
    check_memlock,
    device_exists,
    load_pyverbs,
    no_gid,
    port_down,
    read_ports,
)
from ckpt_engine.peers.transport.rdma.verbs_errors import unavailable
from ckpt_engine.settings import EngineSettings
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.clock import Clock, SystemClock

log = structlog.get_logger()

_PORTS_AGE_S: Final = 5.0
_SWEEP_S: Final = 0.2  # a removed slot's memory is given back within this
_BUFFERS_BYTES: Final = 4 << 20  # what a few connections need besides the slots
_IMPORT_AGAIN_S: Final = 10.0  # a failed import of pyverbs looks through all of the environment
_LOCK_AGAIN_S: Final = 300.0  # memory: a job may have ended, or somebody may have raised the limit
_CLOCK: Final = SystemClock()


class UnconnectedQueuePair:
    """A queue pair that waits for the other side's endpoint."""

    def __init__(
        self, queue_pair: QueuePair, device: OpenDevice, settings: EngineSettings, total: ByteCounters
    ) -> None:
        self.endpoint = queue_pair.endpoint
        self._queue_pair = queue_pair
        self._device = device
        self._settings = settings
        self._total = total

    def connect(self, tcp: Connection, remote: QueuePairEndpoint) -> RdmaConnection:
        """Connect it. The result owns `tcp`. Raises RdmaUnavailable, DeviceLost or DeviceRefused; it is closed then,
        `tcp` is not."""
        try:
            self._queue_pair.connect(remote)
            return RdmaConnection(tcp, self._queue_pair, self._device, self._settings, self._total)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | RuntimeError | ValueError):
                raise _no_resources(error) from error
            raise

    def close(self) -> None:
        self._queue_pair.close()


class Nics:
    """Thread-safe. Opens nothing until asked."""

    def __init__(
        self,
        settings: EngineSettings,
        total: ByteCounters,
        counters: Counters | None = None,
        *,
        sysfs: Path = SYSFS,
        clock: Clock = _CLOCK,
    ) -> None:
        """`total` counts the bytes of all RDMA connections. `sysfs` is where that is mounted."""
        self._settings = settings
        self._total = total
        self._sysfs = sysfs
        self._clock = clock
        self._devices: dict[str, OpenDevice] = {}
        self._given_up: list[OpenDevice] = []  # until their last connection has ended
        self._turns = {offers: itertools.count() for offers in (True, False)}  # answers do not skip ports of offers
        self._ports: tuple[RdmaPort, ...] = ()
        self._networks: Networks = {}
        self._read_s = float("-inf")  # when these two were read
        self._refusal: tuple[RdmaUnavailable, float] | None = None  # until when it holds
        self._lock = threading.Lock()
        self._closed = False
        self._sweeper = WorkerThread("rdma-sweep", self._sweep, counters=counters)
        self._sweeping = False

    def prepare(self, peer: QueuePairEndpoint | None = None) -> UnconnectedQueuePair:
        """A queue pair on the next active port that suits. `peer`: what it is to be connected to, where that is known.
        Raises RdmaUnavailable, with the reason."""
        with self._lock:
            try:
                return self._prepare_locked(peer)
            except (OSError, RuntimeError, ValueError) as error:
                raise _no_resources(error) from error

    def sweep_now(self) -> None:
        """Give the memory of removed slots back, where no transfer uses it any more. Has happened when this returns."""
        with self._lock:
            devices = self._all_locked()
        for device in devices:
            device.registrations.sweep()
        with self._lock:
            self._given_up = [device for device in self._given_up if not device.has_ended]

    @property
    def registered_bytes(self) -> int:
        """Slots that are locked in memory for NICs now."""
        with self._lock:
            return self._registered_bytes_locked()

    def close(self) -> None:
        """Connections that are still open keep their device until they are closed."""
        with self._lock:
            self._closed = True
            devices = self._give_up_locked(*self._devices)
        self._sweeper.stop()
        for device in devices:
            device.close()

    def _prepare_locked(self, peer: QueuePairEndpoint | None) -> UnconnectedQueuePair:
        if self._closed:
            raise RdmaUnavailable(Refusal.NO_DEVICE, "The engine is being closed.", hint="nothing to do")
        self._check_refused_locked()
        try:
            load_pyverbs()
        except RdmaUnavailable as error:
            self._refusal = error, self._clock.monotonic_s() + _IMPORT_AGAIN_S
            raise
        check_memlock(_BUFFERS_BYTES)
        for is_last in (False, True):
            port = self._choose_locked(peer)
            try:
                return self._make_locked(port)
            except DeviceLost as error:  # perhaps it was opened before it vanished and came back
                for device in self._give_up_locked(port.device):
                    device.close()
                if is_last:
                    raise self._unavailable_locked(port, error) from error
        raise AssertionError("the second attempt returns or raises")

    def _check_refused_locked(self) -> None:
        if self._refusal is not None:
            error, until_s = self._refusal
            if self._clock.monotonic_s() < until_s:
                raise RdmaUnavailable(error.reason, error.message, hint=error.hint)
            self._refusal = None

    def _choose_locked(self, peer: QueuePairEndpoint | None) -> RdmaPort:
        """A port may have up to a thousand addresses, each a file of its own: they are not read for each connection."""
        if self._clock.monotonic_s() - self._read_s > _PORTS_AGE_S or not any(port.is_active for port in self._ports):
            self._ports, self._networks = read_ports(self._sysfs), connected_networks()
            self._read_s = self._clock.monotonic_s()
        ports = allowed_ports(self._ports, self._settings.rdma_devices)
        active = [port for port in ports if port.is_active]
        if not active:
            raise port_down(ports)
        usable = [port for port in active if port.gid is not None]
        if not usable:
            raise no_gid(active)
        return choose_port(
            usable, next(self._turns[peer is None]), near_nodes=self._gpu_nodes, peer=peer, networks=self._networks
        )

    @functools.cached_property
    def _gpu_nodes(self) -> frozenset[int]:
        return gpu_numa_nodes(self._sysfs)

    def _make_locked(self, port: RdmaPort) -> UnconnectedQueuePair:
        """Raises DeviceLost if the device is gone, RdmaUnavailable if it refuses; then it stays as it is."""
        try:
            device = self._devices.get(port.device)
            if device is None:
                device = self._devices[port.device] = OpenDevice(port, on_memlock=self._refuse)
            if not self._sweeping:
                self._sweeper.start()
                self._sweeping = True
            pair = QueuePair(device, port, traffic_class=self._settings.rdma_traffic_class)
        except (DeviceRefused, RdmaUnavailable) as error:
            if not device_exists(port.device, self._sysfs):
                raise DeviceLost(error.message, hint=DeviceLost.next_step) from error
            if isinstance(error, DeviceRefused):
                raise self._unavailable_locked(port, error) from error
            raise
        if (gid := port.gid) is not None:
            _log_choice(port.name, gid.index, gid.kind)
        return UnconnectedQueuePair(pair, device, self._settings, self._total)

    def _refuse(self, refusal: RdmaUnavailable) -> None:
        """A slot cannot be registered. Without that RDMA is of no use: connections end after the transfer that they
        are in, and the next ones are refused for a while."""
        with self._lock:
            self._refusal = refusal, self._clock.monotonic_s() + _LOCK_AGAIN_S
            devices = self._give_up_locked(*self._devices)
        for device in devices:
            device.close()
        log.warning("rdma_given_up", reason=refusal.message, next_step=refusal.hint, tried_again_in_s=_LOCK_AGAIN_S)

    def _give_up_locked(self, *names: str) -> list[OpenDevice]:
        """These are to be closed; then each ends with its last connection, and is swept until then."""
        found = [self._devices.pop(name) for name in names if name in self._devices]
        self._given_up += found
        self._ports = ()  # read them anew
        return found

    def _all_locked(self) -> list[OpenDevice]:
        return [*self._devices.values(), *self._given_up]

    def _registered_bytes_locked(self) -> int:
        return sum(device.registrations.size_bytes for device in self._all_locked())

    def _unavailable_locked(self, port: RdmaPort, error: QueuePairError) -> RdmaUnavailable:
        return unavailable(port.device, error, needed_bytes=self._registered_bytes_locked() + _BUFFERS_BYTES)

    def _sweep(self) -> float:
        self.sweep_now()
        return _SWEEP_S


@functools.cache  # once per choice
def _log_choice(name: str, gid_index: int, kind: str) -> None:
    log.info("rdma_port_chosen", port=name, gid_index=gid_index, gid_kind=kind)


def _no_resources(error: Exception) -> RdmaUnavailable:
    return RdmaUnavailable(
        Refusal.NO_ACCESS,
        f"No queue pair could be made: {type(error).__name__}: {error}.",
        hint="the next connection tries again; if the engine has too many open files: ulimit -n",
    )
