"""Traces: files of faults with their moments, which `flyball simulate replay` runs again.

A trace is the JSON of a failed seed, or the event log of a real job: then its incidents become the faults.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import msgspec

from flyball import __version__
from flyball.contracts import wire
from flyball.contracts.errors import ConfigurationError, NotFound
from flyball.contracts.wire import MAX_MESSAGE_BYTES
from goodput.wording import counted
from simulator.swarm.trials import ClusterTrial, FleetTrial, Trial

SCHEMA = "flyball.trace.v1"
SWARM_SCHEMA = "flyball.swarm.v1"
_HINT = "give a trace of `flyball simulate swarm --traces FOLDER`, or a job's event log"


class Trace(msgspec.Struct, frozen=True):
    """A trace file."""

    schema: str
    version: str  # of the release that wrote it
    trial: ClusterTrial | FleetTrial


def trace_of(trial: Trial) -> Trace:
    """A trial as a trace file of this release."""
    return Trace(SCHEMA, __version__, trial)


def read_trace(path: Path) -> Trace | None:
    """The trace in a file; None if the file has no schema, and may be an event log. Raises NotFound and
    ConfigurationError."""
    try:
        size_bytes = path.stat().st_size
        text = path.read_bytes() if size_bytes <= MAX_MESSAGE_BYTES else b""
    except OSError as error:
        raise NotFound(f"There is no trace {path}: {error.strerror}.", hint=_HINT) from error
    if not text.strip() and size_bytes <= MAX_MESSAGE_BYTES:
        raise ConfigurationError(f"{path} is empty.", hint=_HINT)
    try:
        content: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema is None:
        return None
    if schema == SWARM_SCHEMA:
        failures = content.get("failures")
        count = len(failures) if isinstance(failures, list) else 0
        raise ConfigurationError(
            f"{path} is the result of a swarm, with {counted(count, 'failure')}.",
            hint="take the trace of one of them: `jq .failures[0].trace FILE > trace.json`",
        )
    if schema != SCHEMA:
        raise ConfigurationError(f"{path} is of the kind {schema!r}, which is no trace.", hint=_HINT)
    try:
        return _checked(wire.convert(content, Trace))
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigurationError(f"{path}: {str(error).rstrip('.')}.", hint=_HINT) from error


def _checked(trace: Trace) -> Trace:
    """Raises ValueError if a figure is beyond what a world can be made of."""
    trial = trace.trial
    if trial.seed < 0:
        raise ValueError(f"the seed is {trial.seed}, and must not be negative")
    for place, after_s in enumerate([fault.after_s for fault in trial.faults]):
        if not 0.0 <= after_s < inf:
            raise ValueError(f"faults[{place}].after_s is {after_s}, and must be a number of seconds from 0 on")
    if isinstance(trial, ClusterTrial):
        sizes = {name: getattr(trial.scenario, name) for name in ("nodes", "ranks_per_node", "racks", "step_s")}
        for name, value in sizes.items():
            if not value > 0:
                raise ValueError(f"scenario.{name} is {value}, and must be above 0")
        for name in ("spares", "min_nodes", "within_s"):
            if not getattr(trial.scenario, name) >= 0:
                raise ValueError(f"scenario.{name} is {getattr(trial.scenario, name)}, and must not be negative")
        for place, one in enumerate(trial.faults):
            if not (0.0 <= one.pick < 1.0 and 0.0 <= one.size < 1.0 and 0.0 <= one.lasts_s < inf):
                raise ValueError(f"faults[{place}]: pick and size go from 0 to below 1, and lasts_s is not negative")
    else:
        causes = trial.scenario.get("causes", [])
        if not isinstance(causes, list) or not all(isinstance(cause, dict) for cause in causes):
            raise ValueError("scenario.causes is not a list of objects")
    return trace
