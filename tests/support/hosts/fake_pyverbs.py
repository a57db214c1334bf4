"""A pyverbs without a device: what it makes is counted, and any call of it can be made to fail or to wait."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.peers.transport.rdma import device, verbs

MTU_4096 = 5
_BIND = 2


class PyverbsError(Exception): ...


class PyverbsRDMAError(PyverbsError):
    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(f"{message}. Errno: {error_code}, {os.strerror(error_code)}")
        self.error_code = error_code


class FakePyverbs:
    """What was made and not closed, and what is to fail."""

    def __init__(self) -> None:
        self.contexts: list[str] = []  # names of opened devices, also of those that were closed again
        self.alive: list[Object] = []
        self.failing: dict[str, int] = {}  # class -> the errno of its next calls
        self.before: dict[str, Callable[[], None]] = {}  # class -> called first
        self.routes: list[dict[str, Any]] = []

    @property
    def slots(self) -> int:
        """Registered regions that are no buffers of a queue pair: those may not be bound to."""
        return sum(made.kind == "MR" and bool(made.given[2] & _BIND) for made in self.alive)

    def count(self, kind: str) -> int:
        return sum(made.kind == kind for made in self.alive)

    def make(self, kind: str, *given: object, **named: Any) -> Object:  # noqa: ANN401 - as pyverbs
        self.before.get(kind, lambda: None)()
        if (code := self.failing.get(kind)) is not None:
            raise OSError(code, os.strerror(code)) if code == errno.EMFILE else PyverbsRDMAError(f"no {kind}", code)
        if kind == "Context":
            self.contexts.append(named["name"])
        if kind == "GlobalRoute":
            self.routes.append(named)
        made = Object(self, kind, given)
        self.alive.append(made)
        return made


class Object:
    """Any object of pyverbs."""

    numbers = itertools.count(1)

    def __init__(self, fake: FakePyverbs, kind: str, given: tuple[Any, ...]) -> None:
        self.fake, self.kind, self.given = fake, kind, given
        self.lkey = self.rkey = self.qp_num = next(self.numbers)
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC) if kind == "CompChannel" else -1

    def query_device(self) -> SimpleNamespace:
        return SimpleNamespace(device_cap_flags=-1, max_qp_rd_atom=16, max_qp_init_rd_atom=16)

    def query_port(self, number: int) -> SimpleNamespace:
        del number
        return SimpleNamespace(active_mtu=MTU_4096)

    def modify(self, *given: object) -> None: ...

    def post_recv(self, *given: object) -> None: ...

    def close(self) -> None:
        if self in self.fake.alive:
            self.fake.alive.remove(self)
            if self.descriptor >= 0:
                os.close(self.descriptor)


class _Enums:
    def __getattr__(self, name: str) -> int:
        return _BIND if name == "IBV_ACCESS_MW_BIND" else 1


_CLASSES = {
    "device": ("Context",),
    "pd": ("PD",),
    "mr": ("MR",),
    "cq": ("CompChannel", "CQ"),
    "qp": ("QP", "QPCap", "QPInitAttr", "QPAttr"),
    "wr": ("SGE", "RecvWR"),
    "addr": ("GID", "GlobalRoute", "AHAttr"),
}


@pytest.fixture
def pyverbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePyverbs]:
    """In place of the real one, if there is any."""
    fake = FakePyverbs()
    errors = SimpleNamespace(PyverbsError=PyverbsError, PyverbsRDMAError=PyverbsRDMAError)
    modules: dict[str, Any] = {"pyverbs": ModuleType("pyverbs"), "pyverbs.libibverbs_enums": _Enums()}
    modules["pyverbs.pyverbs_error"] = errors
    for module, names in _CLASSES.items():
        makers = {name: _maker(fake, name) for name in names}
        modules[f"pyverbs.{module}"] = SimpleNamespace(**makers)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    channels = lambda: {made.descriptor for made in fake.alive if made.kind == "CompChannel"}  # noqa: E731
    monkeypatch.setattr(device, "_channels", channels)
    verbs.load_pyverbs.cache_clear()
    yield fake
    verbs.load_pyverbs.cache_clear()


def _maker(fake: FakePyverbs, kind: str) -> Callable[..., Object]:
    return lambda *given, **named: fake.make(kind, *given, **named)
