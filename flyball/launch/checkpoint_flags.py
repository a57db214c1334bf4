"""The checkpoint settings of `flyball run`: from flags, variables and a file to the job's spec, and to variables with
the settings of the host's engine and trainers. Pure: the caller passes in the function that reads the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from ckpt_engine.settings import (
    CONFIG_VARIABLE,
    NO_CONFIG,
    VARIABLE_PREFIX,
    Config,
    EngineSettings,
    check_variables,
    merge_engine,
    merge_spec,
)
from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.errors import UsageError
from flyball.launch.launch_flags import ALL_FLAGS, TRANSOM_SETTINGS
from flyball.layered_settings import field_names

DEFAULT_EVERY_S = 600.0  # for a folder that is given without an interval
_INTERVALS = ("disk_every_steps", "persistent_every_steps")  # below 0 switches the tier off, as in their origin


class CheckpointSettings(NamedTuple):
    """The settings that were asked for."""

    spec: CheckpointSpec
    engine_environment: Mapping[str, str]
    notices: tuple[str, ...]


def read_nothing(path: str) -> Config:
    """Stands in for callers that read no file."""
    raise UsageError(f"--ckpt-config {path}: files are not read here.")


def gather(
    given: Mapping[str, object], environ: Mapping[str, str], read_config: Callable[[str], Config]
) -> CheckpointSettings:
    """`given`: the values of flags by their `dest`. Raises UsageError and ConfigurationError."""
    check_variables(environ)
    flags: dict[str, tuple[str, object]] = {}
    for flag in ALL_FLAGS:
        if flag.setting and flag.dest in given:
            value = given[flag.dest]
            off = flag.setting in _INTERVALS and isinstance(value, int) and value < 0
            flags[flag.setting] = (f"{flag.names[-1]} {value}", 0 if off else value)
    taken_over, notices = _from_transom(environ, flags)
    variables = {**taken_over, **environ}
    path = str(given.get("ckpt_config") or environ.get(CONFIG_VARIABLE, ""))
    config = read_config(path) if path else NO_CONFIG
    engine_names = field_names(EngineSettings)
    ours = {name: flag for name, flag in flags.items() if name in engine_names}
    merge_engine(config, path, variables, ours)  # report mistakes before anything starts
    spec = merge_spec(config, path, variables, {name: flag for name, flag in flags.items() if name not in ours})
    spec, of_intervals = _with_intervals(spec, flags)
    handed_on = taken_over | {VARIABLE_PREFIX + name.upper(): str(value) for name, (_, value) in ours.items()}
    if path:
        handed_on[CONFIG_VARIABLE] = path
    return CheckpointSettings(spec, handed_on, (*notices, *of_intervals))


def _from_transom(environ: Mapping[str, str], flags: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
    taken: dict[str, str] = {}
    notices: list[str] = []
    for name, setting in TRANSOM_SETTINGS.items():
        variable = VARIABLE_PREFIX + setting.upper()
        if name not in environ:
            continue
        if variable in environ or setting in flags:
            notices.append(f"{name}: not used: {setting} is given")
            continue
        value = environ[name]
        if setting == "refill":
            taken[variable] = "false" if value.lower() in ("on", "true", "1", "yes") else "true"
        else:
            taken[variable] = f"{value}GiB"
        notices.append(f"{name}: taken as {variable}={taken[variable]}")
    return taken, notices


def _with_intervals(spec: CheckpointSpec, flags: Mapping[str, object]) -> tuple[CheckpointSpec, list[str]]:
    """Give each tier that has a folder and no interval the default one, and say so. An explicit interval of 0 turns
    that interval off. Raises UsageError for an interval without a folder."""
    notices = []
    for tier, flag in ((Tier.DISK, "--local-ckpt"), (Tier.PERSISTENT, "--persistent-ckpt")):
        folder: str = getattr(spec, f"{tier}_dir")
        every_steps: int = getattr(spec, f"{tier}_every_steps")
        every_s: float = getattr(spec, f"{tier}_every_s")
        if (every_steps or every_s) and not folder:
            raise UsageError(f"{flag}-interval needs a folder.", hint=f"add {flag}-dir DIR ({tier}_dir)")
        if folder and not (every_steps or every_s or {f"{tier}_every_steps", f"{tier}_every_s"} & flags.keys()):
            spec = msgspec.structs.replace(spec, **{f"{tier}_every_s": DEFAULT_EVERY_S})
            notices.append(
                f"{flag}-dir {folder}: written every {DEFAULT_EVERY_S / 60:.0f} minutes ({flag}-interval STEPS or "
                f"{flag}-interval-s SECONDS change that)"
            )
    return spec, notices
