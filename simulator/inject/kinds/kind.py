"""What every kind of fault has: a name, a target, what it needs, and a plan by which it is injected and undone."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

from flyball.contracts.clock import Clock
from flyball.contracts.errors import UsageError
from simulator.inject.faults import Api
from simulator.inject.host_files import HostFiles

Value: TypeAlias = str | int | float
Plan: TypeAlias = dict[str, Any]  # JSON: all that injecting and undoing need, also in another process


class FaultTarget(StrEnum):
    RANK = "rank"
    HOST = "host"
    SERVICE = "service"  # of the control plane, or a server that it uses


class Option(NamedTuple):
    """A setting of a fault. The type of the default is the type of the value."""

    name: str
    default: Value
    about: str


@dataclass(frozen=True)
class FaultSite:
    """Where a fault is to happen."""

    api: Api
    clock: Clock
    injection_id: str
    host_id: str = ""
    files: HostFiles | None = None  # of the host
    job: str = ""
    rank: int = -1
    spec: Mapping[str, Any] | None = None  # of the job, as the API shows it
    supervisor_dir: Path | None = None  # state folder of the services on this machine
    values: Mapping[str, Value] | None = None

    @property
    def host(self) -> HostFiles:
        if self.files is None:
            raise UsageError("This fault needs a host on this machine.", hint="name one with --host or --rank")
        return self.files

    def text(self, name: str) -> str:
        return str((self.values or {})[name])

    def number(self, name: str) -> float:
        return float((self.values or {})[name])

    def count(self, name: str) -> int:
        return int((self.values or {})[name])


class RealFault(ABC):
    """One kind of fault. `plan` looks and changes nothing; `inject` and `undo` need the plan alone, so that a later
    process can undo what a killed one has done. `undo` may be repeated."""

    name: ClassVar[str]
    about: ClassVar[str]
    target: ClassVar[FaultTarget]
    options: ClassVar[tuple[Option, ...]] = ()
    lasts_s: ClassVar[float] = 0.0  # until it is undone, unless asked otherwise; 0: it has no duration
    causes: ClassVar[tuple[str, ...]] = ()  # of the incident that has to follow; (): none has to

    def lacks(self, site: FaultSite) -> str:
        """Why it is not available there; '' if it is."""
        return ""

    @abstractmethod
    def plan(self, site: FaultSite) -> Plan:
        """Find what is to be broken. Raises NotFound if it is not there."""

    @abstractmethod
    def inject(self, plan: Plan) -> float | None:
        """Break it. Returns the wall-clock moment of the fault if that is not the moment of the call."""

    def undo(self, plan: Plan) -> None:  # noqa: B027 - many have nothing to undo
        """Repair what was broken, unless it was repaired meanwhile."""

    def hold(self, plan: Plan, over: threading.Event) -> None:
        """What has to be done while the fault lasts, until `over` is set."""
        over.wait()

    def values(self, given: Mapping[str, str]) -> dict[str, Value]:
        """All options with their values. Raises UsageError for an unknown name or a bad value."""
        known = {option.name: option.default for option in self.options}
        values: dict[str, Value] = dict(known)
        for name, text in given.items():
            if name not in known:
                names = ", ".join(known) or "none"
                raise UsageError(f"The fault {self.name} has no option {name!r}.", hint=f"its options: {names}")
            try:
                values[name] = value = type(known[name])(text)
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError("not finite")
            except ValueError as error:
                raise UsageError(
                    f"{name}={text} is not valid for the fault {self.name}.",
                    hint=f"give a number, for example {name}={known[name]}",
                ) from error
        return values
