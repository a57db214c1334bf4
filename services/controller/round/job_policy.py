"""Lays a job's own policy settings over the cluster's. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from flyball.contracts import wire
from flyball.contracts.cluster import PolicyValue
from flyball.contracts.errors import ConfigurationError
from services.controller.round.view import PolicySettings

OF_CLUSTER = frozenset(
    {"adopt_only", "spare_fresh_s", "cordoned_percent_per_hour", "host_failures_allowed", "host_failure_window_s"}
)  # they concern all jobs
OF_JOB = tuple(name for name in PolicySettings.__struct_fields__ if name not in OF_CLUSTER)
MAX_SETTINGS = 100


def check(given: Mapping[str, PolicyValue], where: Mapping[str, str] | None = None) -> None:
    """Raise ConfigurationError unless these are settings of a job, with valid values. `where`: name -> its place in a
    file, for the message."""
    if len(given) > MAX_SETTINGS:
        raise ConfigurationError(f"The policy has more than {MAX_SETTINGS} settings.", hint="remove some")
    for name, value in given.items():
        place = f" ({where[name]})" if where and name in where else ""
        if name in OF_CLUSTER:
            raise ConfigurationError(
                f"The policy setting {name}{place} is the cluster's: it concerns all jobs.",
                hint=f"remove it, or set FLYBALL_POLICY__{name.upper()} for the supervisor",
            )
        if name not in OF_JOB:
            near = difflib.get_close_matches(name, OF_JOB, n=1)
            raise ConfigurationError(
                f"The policy has no setting {name!r}{place}.",
                hint=f"did you mean {near[0]}?" if near else f"it has: {', '.join(OF_JOB)}",
            )
        try:
            _convert({name: value})
        except msgspec.ValidationError as error:
            raise ConfigurationError(
                f"The policy setting {name}{place} has an invalid value: {error}.", hint="correct or remove it"
            ) from error


def settings_of(settings: PolicySettings, given: Mapping[str, PolicyValue]) -> PolicySettings:
    """Return the cluster's settings with a job's own in their place. Skips those of another release, which this one
    does not know."""
    for name, value in given.items():
        if name in OF_JOB:
            try:
                known = _convert({name: value})
            except msgspec.ValidationError:
                continue
            settings = msgspec.structs.replace(settings, **{name: getattr(known, name)})
    return settings


def _convert(given: Mapping[str, PolicyValue]) -> PolicySettings:
    return wire.convert(given, PolicySettings)
