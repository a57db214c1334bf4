"""The devices of a host, with a pyverbs that needs none: what is kept, given up, refused, registered and swept."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from support.clocks.manual import ManualClock
from support.clocks.waits import until
from support.hosts.fake_pyverbs import FakePyverbs, pyverbs
from support.hosts.rdma import add_port

from ckpt_engine.contracts.peer_wire import QueuePairEndpoint
from ckpt_engine.peers.transport.port import ByteCounters
from ckpt_engine.peers.transport.rdma import nics as nics_module
from ckpt_engine.peers.transport.rdma import registrations as registrations_module
from ckpt_engine.peers.transport.rdma import verbs, verbs_errors
from ckpt_engine.peers.transport.rdma.nics import Nics, UnconnectedQueuePair
from ckpt_engine.peers.transport.rdma.registrations import Registration, Registrations
from ckpt_engine.peers.transport.rdma.verbs import RdmaUnavailable, Refusal
from ckpt_engine.settings import EngineSettings

__all__ = ["pyverbs"]

MIB = 1 << 20
SHARED = Path("/dev/shm")
DEADLINE_S = 30.0
AGES_S = 3600.0
PEER = QueuePairEndpoint(17, 4711, "0" * 20 + "ffff0a000001", 0, 1024, False, 16, 32768, 16)


class Slot:
    def __init__(self, size_bytes: int = MIB) -> None:
        self.path = SHARED / f"flyball-test-{uuid4().hex}"
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.descriptor, size_bytes)
        self.size_bytes = size_bytes


@pytest.fixture
def make_slot() -> Iterator[Callable[[], Slot]]:
    made: list[Slot] = []

    def make() -> Slot:
        made.append(Slot())
        return made[-1]

    yield make
    for slot in made:
        os.close(slot.descriptor)
        slot.path.unlink(missing_ok=True)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return add_port(tmp_path, "mlx5_0")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def nics(host: Path, pyverbs: FakePyverbs, clock: ManualClock) -> Iterator[Nics]:
    own = Nics(EngineSettings(), ByteCounters(), sysfs=host, clock=clock)
    yield own
    own.close()


def refusal(nics: Nics, peer: QueuePairEndpoint | None = None) -> RdmaUnavailable:
    with pytest.raises(RdmaUnavailable) as raised:
        nics.prepare(peer)
    return raised.value


def registrations(prepared: UnconnectedQueuePair) -> Registrations:
    return prepared._device.registrations


def enter(prepared: UnconnectedQueuePair, slot: Slot) -> Registration | None:
    return registrations(prepared).enter(slot.descriptor)


# --- a device that refuses, and one that is gone ---


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM, errno.EAGAIN, errno.EINVAL])
def test_a_device_that_refuses_a_queue_pair_is_kept_with_its_slots(
    nics: Nics, pyverbs: FakePyverbs, make_slot: Callable[[], Slot], code: int
) -> None:
    first = nics.prepare()
    assert enter(first, make_slot()) is not None
    pyverbs.failing["QP"] = code
    assert refusal(nics).reason is Refusal.NO_ACCESS
    pyverbs.failing.clear()
    second = nics.prepare()
    assert pyverbs.contexts == ["mlx5_0"]
    assert registrations(second) is registrations(first)
    assert pyverbs.slots == 1


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM])
def test_a_queue_pair_refused_under_a_low_limit_is_for_want_of_lockable_memory(
    nics: Nics, pyverbs: FakePyverbs, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for module in (verbs, verbs_errors):
        monkeypatch.setattr(module, "memlock_limit", lambda: 8 * MIB)
    pyverbs.failing["QP"] = code
    error = refusal(nics)
    assert (error.reason, error.message[:43]) == (Refusal.MEMLOCK, "This process may lock 8192 KiB of memory, a")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
def test_a_lost_device_is_opened_anew_and_the_old_one_swept_until_its_last_connection_ends(
    nics: Nics, pyverbs: FakePyverbs, make_slot: Callable[[], Slot], code: int
) -> None:
    old, slot = nics.prepare(), make_slot()
    used = enter(old, slot)
    assert used is not None
    registrations(old).leave(enter(old, slot) or pytest.fail("it is registered"))
    pyverbs.failing["QP"] = code
    assert refusal(nics).reason is Refusal.NO_DEVICE
    pyverbs.failing.clear()
    new = nics.prepare()
    assert registrations(new) is not registrations(old)
    assert nics.registered_bytes == slot.size_bytes, "a given up device's slots count"
    registrations(old).leave(used)
    slot.path.unlink()
    nics.sweep_now()
    assert pyverbs.slots == 0
    old.close()
    nics.sweep_now()
    assert pyverbs.count("Context") == 1
    assert nics._given_up == []


def test_a_device_whose_folder_is_gone_is_lost_whatever_the_error(nics: Nics, pyverbs: FakePyverbs, host: Path) -> None:
    prepared = nics.prepare()
    shutil.rmtree(host / "class" / "infiniband" / "mlx5_0")
    pyverbs.failing["QP"] = errno.EINVAL
    assert refusal(nics).message == "The kernel has an RDMA stack, but no RDMA device."
    prepared.close()
    assert pyverbs.count("Context") == 0


def test_a_device_that_is_gone_before_it_was_opened_is_not_opened(nics: Nics, pyverbs: FakePyverbs, host: Path) -> None:
    add_port(host, "mlx5_1")
    nics.prepare().close()
    shutil.rmtree(host / "class" / "infiniband" / "mlx5_1")
    pyverbs.failing["Context"] = errno.ENODEV
    for _ in range(2):
        nics.prepare().close()
    assert pyverbs.contexts == ["mlx5_0"], "the other port is used"


def test_what_the_operating_system_refuses_is_a_refusal_too(
    nics: Nics, pyverbs: FakePyverbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyverbs.failing["CompChannel"] = errno.EMFILE
    error = refusal(nics)
    assert "Too many open files" in error.message
    assert "ulimit -n" in error.hint
    pyverbs.failing.clear()
    monkeypatch.setattr("ckpt_engine.peers.transport.rdma.device._channels", set)
    assert "completion channel was not found" in refusal(nics).message
    assert {kind: pyverbs.count(kind) for kind in ("MR", "CompChannel", "CQ", "QP")} == dict.fromkeys(
        ("MR", "CompChannel", "CQ", "QP"), 0
    )


def test_a_channel_whose_descriptor_was_one_of_a_channel_that_was_just_closed_is_found(
    nics: Nics, pyverbs: FakePyverbs
) -> None:
    pairs = [nics.prepare() for _ in range(2)]
    garbage = [made for made in pyverbs.alive if made.kind == "CompChannel"]
    pyverbs.before["CompChannel"] = lambda: garbage.pop().close() if garbage else None
    prepared = nics.prepare()
    assert garbage == []
    (own,) = [made.descriptor for made in pyverbs.alive if made.kind == "CompChannel"]
    assert prepared._queue_pair.descriptor == own
    for pair in (prepared, *pairs):
        pair.close()


def test_without_a_thread_for_the_sweeps_there_is_no_queue_pair_until_there_is_one(
    nics: Nics, pyverbs: FakePyverbs, make_slot: Callable[[], Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert "can't start new thread" in refusal(nics).message
    prepared, slot = nics.prepare(), make_slot()
    registrations(prepared).leave(enter(prepared, slot) or pytest.fail("it is registered"))
    slot.path.unlink()
    until(lambda: pyverbs.slots == 0)


def test_a_failed_import_of_pyverbs_is_remembered_for_a_while(
    nics: Nics, pyverbs: FakePyverbs, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del pyverbs
    tries: list[None] = []

    def no_pyverbs() -> None:
        tries.append(None)
        raise RdmaUnavailable(Refusal.NO_PYVERBS, "pyverbs is not installed in this environment.", hint=verbs.INSTALL)

    monkeypatch.setattr(nics_module, "load_pyverbs", no_pyverbs)
    for _ in range(3):
        error = refusal(nics)
        assert (error.reason, error.hint) == (Refusal.NO_PYVERBS, verbs.INSTALL)
    assert len(tries) == 1
    for tried in (2, 3):
        clock.sleep(AGES_S)
        refusal(nics)
        assert len(tries) == tried


# --- slots that cannot be registered ---


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM])
def test_a_slot_that_may_not_be_locked_ends_rdma_with_the_reason_until_it_is_tried_again(
    nics: Nics,
    pyverbs: FakePyverbs,
    make_slot: Callable[[], Slot],
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    monkeypatch.setattr(verbs, "memlock_limit", lambda: 8 * MIB)
    prepared = nics.prepare()
    pyverbs.failing["MR"] = code
    assert enter(prepared, make_slot()) is None
    for _ in range(2):
        error = refusal(nics)
        assert error.reason is Refusal.MEMLOCK
        assert error.message.startswith("This process may lock 8192 KiB of memory, and needs 1024 KiB")
        assert "ulimit -l unlimited" in error.hint
    assert prepared._device.is_closing, "its connection ends after this transfer"
    pyverbs.failing.clear()
    assert enter(prepared, make_slot()) is None, "the device is given up"
    prepared.close()
    assert pyverbs.count("Context") == 0
    clock.sleep(299.0)
    refusal(nics)
    clock.sleep(2.0)
    assert enter(nics.prepare(), make_slot()) is not None


def test_a_slot_that_a_device_cannot_register_is_not_tried_for_every_transfer(
    nics: Nics, pyverbs: FakePyverbs, make_slot: Callable[[], Slot]
) -> None:
    prepared, slot, tries = nics.prepare(), make_slot(), []
    pyverbs.failing["MR"] = errno.EFAULT
    pyverbs.before["MR"] = lambda: tries.append(None)
    for _ in range(3):
        assert enter(prepared, slot) is None
    assert len(tries) == 1
    pyverbs.failing.clear()
    assert enter(prepared, make_slot()) is not None, "others are"
    nics.prepare()


def test_a_slot_is_registered_in_regions_of_bounded_size_all_or_none(
    pyverbs: FakePyverbs, make_slot: Callable[[], Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations_module, "_REGION_BYTES", 400_000)
    registrations, slot = Registrations(None), make_slot()
    registration = registrations.enter(slot.descriptor)
    assert registration is not None
    assert [made.given[1] for made in pyverbs.alive if made.kind == "MR"] == [400_000, 400_000, MIB - 800_000]
    assert list(registration.cut(0, MIB)) == [(0, 400_000), (400_000, 400_000), (800_000, MIB - 800_000)]
    assert list(registration.cut(399_999, 2)) == [(399_999, 1), (400_000, 1)]
    assert list(registration.cut(5, 7)) == [(5, 7)]
    keys = [made.lkey for made in pyverbs.alive if made.kind == "MR"]
    assert [registration.local(offset, 1)[2] for offset in (0, 399_999, 400_000, MIB - 1)] == [
        keys[0],
        keys[0],
        keys[1],
        keys[2],
    ]
    registrations.close()
    assert pyverbs.slots == 0

    def refuse_the_second() -> None:
        if pyverbs.slots:
            pyverbs.failing["MR"] = errno.ENOMEM

    pyverbs.before["MR"] = refuse_the_second
    assert registrations.enter(slot.descriptor) is None
    assert pyverbs.slots == 0


def test_while_a_slot_is_registered_others_are_too_and_who_wants_the_same_one_waits(
    nics: Nics, pyverbs: FakePyverbs, make_slot: Callable[[], Slot]
) -> None:
    prepared, slow, quick = nics.prepare(), make_slot(), make_slot()
    began, may_end = threading.Event(), threading.Event()

    def slowly() -> None:
        pyverbs.before.clear()
        began.set()
        assert may_end.wait(DEADLINE_S)

    pyverbs.before["MR"] = slowly
    with ThreadPoolExecutor(2) as threads:
        registering = threads.submit(enter, prepared, slow)
        assert began.wait(DEADLINE_S)
        assert enter(prepared, quick) is not None
        assert nics.registered_bytes == quick.size_bytes
        waiting = threads.submit(enter, prepared, slow)
        may_end.set()
        assert registering.result(DEADLINE_S) is waiting.result(DEADLINE_S) is not None
    assert pyverbs.slots == 2


# --- the memory of removed slots ---


def test_a_removed_slot_is_given_back_at_once_when_asked_and_one_in_use_when_it_is_left(
    nics: Nics, pyverbs: FakePyverbs, make_slot: Callable[[], Slot]
) -> None:
    prepared, idle, busy, kept = nics.prepare(), make_slot(), make_slot(), make_slot()
    nics._sweeper.stop()
    assert nics._sweeper.join(DEADLINE_S)
    for slot in (idle, kept):
        registrations(prepared).leave(enter(prepared, slot) or pytest.fail("it is registered"))
    used = enter(prepared, busy)
    assert used is not None
    idle.path.unlink()
    busy.path.unlink()
    nics.sweep_now()
    assert pyverbs.slots == 2
    registrations(prepared).leave(used)
    assert pyverbs.slots == 1
    assert nics.registered_bytes == kept.size_bytes


def test_the_sweeper_gives_a_removed_slot_back_unasked(
    nics: Nics, pyverbs: FakePyverbs, make_slot: Callable[[], Slot]
) -> None:
    prepared, slot = nics.prepare(), make_slot()
    registrations(prepared).leave(enter(prepared, slot) or pytest.fail("it is registered"))
    slot.path.unlink()
    until(lambda: pyverbs.slots == 0)
