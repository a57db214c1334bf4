"""A scenario: a cluster, one job, and what goes wrong, as a TOML file says it. Every error names its field."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flyball.contracts.errors import ConfigurationError, NotFound, UsageError
from services.controller.round import job_policy

SHIPPED = files("simulator.fleet") / "scenarios"
SECONDS_PER_DAY = 86_400.0

Positive = Annotated[float, Field(gt=0.0, le=1e9, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Effect(StrEnum):
    """What a fault does to the job."""

    PROCESS = "process"  # a worker ends; its host is well
    GPU = "gpu"  # a worker ends, and its host reports a critical condition: it needs repair
    HOST = "host"  # a host is gone, and nobody says so
    HANG = "hang"  # a worker stands still; its host is well
    PLANNED = "planned"  # an operator drains a host


class FaultReach(StrEnum):
    """How many hosts a fault hits at once."""

    ONE = "one"
    RACK = "rack"  # all hosts of a rack: a switch, or its power


class Distribution(StrEnum):
    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    TRACE = "trace"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class JobSection(_Section):
    """The job."""

    nodes: int = Field(ge=1, le=65_536, description="hosts of the job")
    gpus_per_node: int = Field(default=8, ge=1, le=64, description="GPUs of a host, one rank each")
    step_s: Positive = Field(description="seconds per training step")
    max_restarts: int = Field(
        default=1000, ge=0, description="restarts without progress in between, as in `flyball run`"
    )
    hang_timeout_s: NotNegative = Field(
        default=0.0,
        description="seconds without progress after which a rank counts as hung; 0: adapts to the job's steps",
    )
    policy: dict[str, bool | int | float | str] = Field(
        default={}, description="settings of the controller's policy for the job, e.g. verify_deadline_s"
    )

    @field_validator("policy")
    @classmethod
    def _are_known(cls, given: dict[str, Any]) -> dict[str, Any]:
        try:
            job_policy.check(given)
        except ConfigurationError as error:
            raise ValueError(error.message.rstrip(".")) from error
        return given


class ClusterSection(_Section):
    """The hosts."""

    spares: int = Field(ge=0, le=65_536, description="hosts beside the job's, free at the start")
    hosts_per_rack: int = Field(
        default=16, ge=1, le=1024, description="hosts that share a rack, its switch and its power"
    )
    repair_s: Positive = Field(
        14_400.0, description="mean seconds until a broken host is back (exponentially distributed)"
    )
    reboot_s: Positive = Field(default=600.0, description="seconds until a host that only went away is back")
    repairs_that_hold: Share = Field(
        default=1.0, description="share of repairs that hold; after the others the fault returns"
    )
    relapse_s: Positive = Field(
        default=3600.0, description="mean seconds of work until a fault that was not repaired returns"
    )
    lemons: Share = Field(default=0.0, description="share of hosts that fail more often than the others")
    lemon_factor: float = Field(default=10.0, ge=1.0, le=1000.0, description="how many times as often")


class Checkpoint(_Section):
    """How the job saves."""

    every_s: Positive = Field(description="seconds between two saves to memory and to a replica; whole steps are taken")
    save_s: NotNegative = Field(default=0.0, description="seconds for which a save holds up training")
    replicas: int = Field(default=1, ge=0, le=3, description="hosts that hold a copy of each host's memory")
    replicate_s: NotNegative = Field(default=5.0, description="seconds after a save until its replicas are complete")
    persistent_every: int = Field(
        default=0, ge=0, le=100_000, description="every how many saves one goes to the persistent tier; 0: none does"
    )
    persistent_s: NotNegative = Field(default=120.0, description="seconds after a save until it is complete there")


class Times(_Section):
    """How long each part of a recovery takes. Detection and decisions are not set: the production code makes them."""

    notice_s: NotNegative = Field(
        default=0.05, description="from the end of a worker until the controller has the report"
    )
    stop_s: Annotated[float, Field(ge=0.0, le=15.0)] = Field(
        default=1.0, description="to stop all workers, and to list the copies; hosts that take longer are given up"
    )
    start_s: NotNegative = Field(default=20.0, description="to start all workers: processes, imports, rendezvous")
    restore_s: NotNegative = Field(default=5.0, description="to load a step from memory or a replica")
    persistent_restore_s: NotNegative = Field(default=60.0, description="to load it from the persistent tier")


class Observed(_Section):
    """Over what the counts of the causes were observed. Default: the nodes and days of the file, before any setting."""

    nodes: int = Field(ge=1, description="hosts that were watched")
    days: Positive = Field(description="days for which they were watched")


class Cause(_Section):
    """One cause of faults. Its moments come from a random stream of its own."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="its name: letters, digits and hyphens")
    effect: Effect = Field(description="process, gpu, host, hang or planned")
    reach: FaultReach = Field(default=FaultReach.ONE, description="one host, or all hosts of a rack")
    count: NotNegative | None = Field(default=None, description="how often it was observed, see [observed]")
    per_1000_node_days: NotNegative | None = Field(default=None, description="or its rate")
    distribution: Distribution = Field(
        default=Distribution.EXPONENTIAL, description="of the time between two faults: exponential, weibull or trace"
    )
    shape: Positive = Field(default=1.0, description="of the Weibull distribution; below 1 faults come in bursts")
    at_s: tuple[NotNegative, ...] = Field(
        default=(), description="for a trace: when it happens, in seconds from the start"
    )
    message: str = Field(default="", max_length=200, description="for a worker's end: the error that it reports")

    @model_validator(mode="after")
    def _has_one_rate(self) -> Cause:
        if self.distribution is Distribution.TRACE:
            if self.count is not None or self.per_1000_node_days is not None:
                raise ValueError("a trace has at_s, and neither count nor per_1000_node_days")
        elif (self.count is None) == (self.per_1000_node_days is None):
            raise ValueError("give one of count and per_1000_node_days")
        return self


class FleetScenario(_Section):
    """A scenario file."""

    about: str = Field(min_length=1, description="what it shows, in a sentence")
    sources: tuple[str, ...] = Field(default=(), description="where its figures come from")
    assumptions: tuple[str, ...] = Field(default=(), description="what no source says")
    days: Annotated[float, Field(gt=0.0, le=3650.0)] = Field(description="how long the job runs, in days")
    job: JobSection
    cluster: ClusterSection
    checkpoint: Checkpoint
    times: Times = Times()
    observed: Observed | None = None
    causes: tuple[Cause, ...] = ()

    @model_validator(mode="after")
    def _names_each_cause_once(self) -> FleetScenario:
        names = [cause.name for cause in self.causes]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the cause {twice} is there twice")
        return self

    @property
    def gpus(self) -> int:
        return self.job.nodes * self.job.gpus_per_node

    @property
    def length_s(self) -> float:
        return self.days * SECONDS_PER_DAY

    def rate_per_s(self, cause: Cause) -> float:
        """How often a cause strikes the job's hosts. 0.0 for a trace."""
        if cause.per_1000_node_days is not None:
            return cause.per_1000_node_days / 1000.0 * self.job.nodes / SECONDS_PER_DAY
        seen = self.observed or Observed(nodes=self.job.nodes, days=self.days)
        return (cause.count or 0.0) / (seen.nodes * seen.days * SECONDS_PER_DAY) * self.job.nodes

    @property
    def faults_per_incident(self) -> float:
        """How many faults come on average until an incident is over: once the steps since the last save are done
        again."""
        saving, times = self.checkpoint, self.times
        is_far = saving.persistent_every and not saving.replicas
        redo_s = saving.every_s * (saving.persistent_every if is_far else 1)
        lasts_s = redo_s + times.start_s + (times.persistent_restore_s if is_far else times.restore_s)
        return lasts_s * sum(self.rate_per_s(cause) for cause in self.causes)


_SECTIONS: Mapping[str, type[BaseModel]] = {
    "job": JobSection,
    "cluster": ClusterSection,
    "checkpoint": Checkpoint,
    "times": Times,
    "observed": Observed,
    "causes": Cause,
}


class FieldHelp(NamedTuple):
    """A field of a scenario file."""

    name: str  # "checkpoint.every_s"; of a cause "causes.count"
    default: str  # "" if it must be given
    meaning: str


def fields() -> Iterator[FieldHelp]:
    """Every field of a scenario file, in order."""
    for name, field in FleetScenario.model_fields.items():
        section = _SECTIONS.get(name)
        if section is None:
            yield FieldHelp(name, _default(field), field.description or "")
            continue
        for inner, of_section in section.model_fields.items():
            yield FieldHelp(f"{name}.{inner}", _default(of_section), of_section.description or "")


def _default(field: Any) -> str:  # noqa: ANN401 - pydantic's FieldInfo
    return "" if field.is_required() else str(field.default if field.default not in ((), None) else "none")


def shipped() -> list[str]:
    """The names of the scenarios that Flyball ships."""
    return sorted(entry.name.removesuffix(".toml") for entry in SHIPPED.iterdir() if entry.name.endswith(".toml"))


def read(name: str) -> str:
    """The text of a shipped scenario, or of a file. Raises NotFound."""
    if name in shipped():
        return (SHIPPED / f"{name}.toml").read_text(encoding="utf-8")
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        near = get_close_matches(name, shipped(), n=1)
        raise NotFound(
            f"There is no scenario {name}: {error.strerror}.",
            hint=f"did you mean {near[0]}?" if near else f"name a TOML file, or one of: {', '.join(shipped())}",
        ) from error


def load(name: str, settings: Sequence[str] = ()) -> FleetScenario:
    """A shipped scenario or a file, with `key=value` settings over it."""
    return parse(read(name), name, settings)


def parse(text: str, name: str, settings: Sequence[str] = ()) -> FleetScenario:
    """A scenario from a file's text. Raises ConfigurationError, which names each wrong field."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name} is not TOML: {error}.", hint="correct the file") from error
    return validated(content, name, settings)


def validated(content: Mapping[str, Any], name: str, settings: Sequence[str] = ()) -> FleetScenario:
    """A scenario from a file's content. Raises ConfigurationError, which names each wrong field."""
    changed = deepcopy(dict(content))
    _keep_what_was_observed(changed)
    for setting in settings:
        _set(changed, setting)
    try:
        return FleetScenario.model_validate(changed)
    except ValidationError as error:
        raise ConfigurationError(
            f"{name}: {'; '.join(_problems(error, changed))}.",
            hint="see the fields with `flyball simulate describe`",
        ) from error


def settings_between(base: FleetScenario, other: FleetScenario) -> list[str]:
    """The `key=value` settings that make `other` of `base`, as `load` takes them. Both have the same causes."""

    def fields(section: BaseModel) -> Iterator[tuple[str, object]]:
        for name, value in section:
            inner = {name: value} if isinstance(value, BaseModel) else {}
            if name == "causes":
                inner = {f"causes.{cause.name}": cause for cause in value}
            for place, one in inner.items():
                yield from ((f"{place}.{field}", found) for field, found in fields(one))
            if not inner:
                yield name, value

    def in_toml(value: object) -> str:
        return str(value) if isinstance(value, float) else json.dumps(value)  # JSON has no inf

    before = dict(fields(base))
    changed = ((name, value) for name, value in fields(other) if before.get(name) != value)
    return [f"{name}={in_toml(value)}" for name, value in changed if value is not None]


def _keep_what_was_observed(content: dict[str, Any]) -> None:
    """Have counts stand for the nodes and days of the file: twice as many nodes fail twice as often."""
    job = content.get("job")
    if "observed" not in content and isinstance(job, dict) and "nodes" in job and "days" in content:
        content["observed"] = {"nodes": job["nodes"], "days": content["days"]}


def _set(content: dict[str, Any], setting: str) -> None:
    """Apply `checkpoint.every_s=60`; a cause is named by its name: `causes.nic.count=7`."""
    key, separator, value = setting.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise UsageError(f"--set {setting} is not a setting.", hint="write key=value, e.g. checkpoint.every_s=60")
    place: Any = content
    for part in path[:-1]:
        if isinstance(place, list):
            place = _named(place, part, setting)
        elif isinstance(place, dict):
            place = place.setdefault(part, {})
    if not isinstance(place, dict):
        raise UsageError(f"--set {setting}: {key} is not a field.", hint="see `flyball simulate describe`")
    place[path[-1]] = _value(value.strip())


def _named(causes: Iterable[Any], name: str, setting: str) -> Any:  # noqa: ANN401 - a table of the file
    causes = list(causes)
    for cause in causes:
        if isinstance(cause, dict) and cause.get("name") == name:
            return cause
    known = ", ".join(str(cause.get("name")) for cause in causes if isinstance(cause, dict))
    raise UsageError(f"--set {setting}: there is no cause {name}.", hint=f"the causes are: {known}")


def _value(text: str) -> Any:  # noqa: ANN401 - any TOML value
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


_MEANINGS = {
    "missing": "must be given",
    "extra_forbidden": "is not a field of a scenario{near}",
    "greater_than": "must be above {gt:g}, not {input}",
    "greater_than_equal": "must be at least {ge:g}, not {input}",
    "less_than_equal": "must be at most {le:g}, not {input}",
    "enum": "must be {expected}, not {input}",
    "float_parsing": "must be a number, not {input}",
    "int_parsing": "must be a whole number, not {input}",
    "int_from_float": "must be a whole number, not {input}",
}


def _problems(error: ValidationError, content: Mapping[str, Any]) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        meaning = _MEANINGS.get(problem["type"])
        field = ".".join(_named_path(problem["loc"], content))
        context = {**problem.get("ctx", {}), "input": problem["input"], "near": _near(problem["loc"], field)}
        text = meaning.format(**context) if meaning else problem["msg"].removeprefix("Value error, ")
        yield f"{field}: {text}" if field else text


def _near(path: Sequence[int | str], field: str) -> str:
    """A field that an unknown one resembles, among those beside it."""
    *place, last = field.split(".")
    section = FleetScenario if len(path) == 1 else _SECTIONS.get(str(path[0]))
    near = get_close_matches(last, section.model_fields, n=1) if section is not None else ()
    return f" (did you mean {'.'.join((*place, near[0]))}?)" if near else ""


def _named_path(path: Sequence[int | str], content: Any) -> Iterator[str]:  # noqa: ANN401 - any TOML value
    """The path of a field, with causes by their names."""
    for part in path:
        try:
            content = content[part]
        except (LookupError, TypeError):
            content = None
        named = isinstance(part, int) and isinstance(content, dict) and content.get("name")
        yield str(named or part)
