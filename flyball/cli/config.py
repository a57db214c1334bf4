"""`flyball config show`: every setting, its value, and where that comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from ckpt_engine.settings import CONFIG_VARIABLE, NO_CONFIG, VARIABLE_PREFIX, check_variables
from flyball.cli.reach.options import command_help, examples, with_supervisor
from flyball.cli.reach.places import find_supervisor, state_root
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import Format, OutputOption, print_table, printed
from flyball.contracts.errors import FlyballError, UsageError

HIDDEN = "(set, not shown)"
DEFAULT = "default"
NESTED = ("policy", "detector", "retention")  # settings of the supervisor that hold settings
SECTIONS = ("command", "supervisor", *NESTED, "engine", "checkpoint")

app = typer.Typer(
    **command_help(
        "Show the settings that hold here, and where each comes from.",
        "flyball config show",
        "flyball config show engine --ckpt-config ckpt.toml",
    ),
    no_args_is_help=True,
)


class Setting(NamedTuple):
    """One setting as it holds in this environment."""

    section: str
    name: str
    value: object
    source: str  # default, a flag, a variable, or a file
    variable: str  # that sets it; '': none does


@app.command(
    "show",
    epilog=examples(
        "flyball config show",
        "flyball config show supervisor -o wide",
        "flyball config show checkpoint --ckpt-config ckpt.toml -o json",
    ),
)
@with_supervisor()
def show(
    *,
    section: Annotated[str, typer.Argument(metavar="[SECTION]", help=f"only one of: {', '.join(SECTIONS)}")] = "",
    set_only: Annotated[bool, typer.Option("--set", help="only what something sets, no defaults")] = False,
    ckpt_config: Annotated[str, typer.Option("--ckpt-config", help="file with checkpoint settings")] = "",
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show every setting with its value and its source: a flag, a variable, a file, or the default.

    They are those of a command, a supervisor, a host and a job that start now, in this environment. Secrets are not
    shown. A wrong setting is an error that names it.
    """
    if section and section not in SECTIONS:
        raise UsageError(f"There is no section {section!r}.", hint=f"choose one of: {', '.join(SECTIONS)}")
    found = [
        one
        for one in settings(os.environ, choice, ckpt_config)
        if section in ("", one.section) and not (set_only and one.source == DEFAULT)
    ]
    if printed([one._asdict() for one in found], output):
        return
    wide = output is Format.WIDE
    columns = ("section", "setting", "value", "from", *(("variable",) if wide else ()))
    print_table("Settings", columns, ((*one[:4], one.variable) if wide else one[:4] for one in found))


def settings(environ: Mapping[str, str], choice: SupervisorChoice, ckpt_config: str) -> Iterator[Setting]:
    """All settings. Raises ConfigurationError for a wrong one."""
    yield from _of_commands(environ, choice)
    yield from _of_supervisor(environ)
    yield from _of_checkpoints(environ, ckpt_config)


def _of_commands(environ: Mapping[str, str], choice: SupervisorChoice) -> Iterator[Setting]:
    """What every command uses to find its supervisor."""
    found = ""
    with suppress(FlyballError):  # none runs, or no token: a command that needs one says so
        found = find_supervisor(environ, **choice.places()).url
    here = Setting("command", "supervisor", found or None, "found running here" if found else DEFAULT, "")
    default_dir = Setting("command", "state_dir", str(state_root(environ)), DEFAULT, "")
    yield _first(here, choice.url, environ)
    if environ.get("FLYBALL_TOKEN") and not choice.token_file:
        yield Setting("command", "token", HIDDEN, "FLYBALL_TOKEN", "FLYBALL_TOKEN")
    else:
        yield _first(Setting("command", "token_file", None, DEFAULT, ""), choice.token_file, environ)
    yield _first(default_dir, choice.state_dir, environ)
    for name in ("ca_file", "client_cert_file", "client_key_file", "shm_dir", "database_url"):
        yield _first(Setting("command", name, None, DEFAULT, ""), "", environ)


def _first(otherwise: Setting, flag: str, environ: Mapping[str, str]) -> Setting:
    """The setting by its flag, else by its variable, else as it is."""
    name = otherwise.name
    variable = f"FLYBALL_{name.upper()}"
    if flag:
        return otherwise._replace(value=flag, source=f"--{name.replace('_', '-')}", variable=variable)
    if environ.get(variable):
        return otherwise._replace(value=_without_password(environ[variable]), source=variable, variable=variable)
    return otherwise._replace(variable=variable)


def _of_supervisor(environ: Mapping[str, str]) -> Iterator[Setting]:
    """What a supervisor that starts now would use."""
    from pydantic import SecretStr

    from services.settings import ENV_PREFIX, Settings, load_settings

    loaded = load_settings()
    given = {name.upper(): value for name, value in environ.items() if value}
    for name in Settings.model_fields:
        variable = ENV_PREFIX + name.upper()
        source = variable if variable in given else given.get(f"{variable}_FILE", DEFAULT)
        value: object = getattr(loaded, name)
        if name in NESTED:
            yield from _nested(name, getattr(loaded, f"{name}_settings"), set(getattr(loaded, name)), variable, given)
            continue
        if isinstance(value, SecretStr):
            value = HIDDEN if value.get_secret_value() else None
        yield Setting("supervisor", name, _without_password(value), source, variable)


def _nested(
    section: str, numbers: msgspec.Struct, given: set[str], variable: str, environ: Mapping[str, str]
) -> Iterator[Setting]:
    for name, value in msgspec.structs.asdict(numbers).items():
        own = f"{variable}__{name.upper()}"
        source = DEFAULT if name not in given else own if own in environ else variable
        yield Setting(section, name, value, source, own)


def _of_checkpoints(environ: Mapping[str, str], ckpt_config: str) -> Iterator[Setting]:
    """What an engine on this host, and a job that is submitted here, would use."""
    from ckpt_engine.settings import merge_engine, merge_spec, read_config

    check_variables(environ)
    path = ckpt_config or environ.get(CONFIG_VARIABLE, "")
    config = read_config(path) if path else NO_CONFIG
    for section, merge in (("engine", merge_engine), ("checkpoint", merge_spec)):
        merged = merge(config, path, environ)
        for name in msgspec.structs.fields(merged):
            variable = VARIABLE_PREFIX + name.name.upper()
            in_file = f"{path}, [{section}]" if name.name in config.get(section, {}) else DEFAULT
            source = variable if variable in environ else in_file
            value = getattr(merged, name.name)
            yield Setting(section, name.name, _without_password(msgspec.to_builtins(value)), source, variable)


def _without_password(value: Any) -> object:  # noqa: ANN401 - any setting
    """A URL without its password; other values as they are."""
    if isinstance(value, str) and "://" in value and "@" in value:
        scheme, _, rest = value.partition("://")
        user, _, place = rest.rpartition("@")
        return f"{scheme}://{user.partition(':')[0]}:***@{place}" if ":" in user else value
    return str(value) if value is not None and not isinstance(value, bool | int | float | str | list | dict) else value
