"""Names and the fencing token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec

from flyball.contracts.errors import UsageError

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
RUN_PATTERN = r"^([0-9]{8}-[0-9]{6}-[0-9]{3})?$"

# A job or host name becomes part of file names, segment names and URLs, so its alphabet is theirs.
_WHOLE_NAME = NAME_PATTERN.removesuffix("$") + r"\Z"  # `$` alone lets a newline follow
JobName = Annotated[str, msgspec.Meta(pattern=_WHOLE_NAME)]
HostId = Annotated[str, msgspec.Meta(pattern=_WHOLE_NAME)]
# A job's name where a report repeats it for every rank. The receiver checks each name once (services.sensor.admission);
# matching the pattern everywhere would cost more than the rest of the decoding.
RepeatedJobName = Annotated[str, msgspec.Meta(min_length=1, max_length=63, extra_json_schema={"pattern": _WHOLE_NAME})]
# One submission of a job; each counts its generations from 1. It names folders, and newer ones sort after older ones.
# '': no folder of its own (docs/decisions/0006).
RunId = Annotated[str, msgspec.Meta(pattern=RUN_PATTERN.removesuffix("$") + r"\Z")]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
MAX_STEP = 2**53
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
# Bounds for message fields: those of the database's columns, and of common sense.
SeenStep = Annotated[int, msgspec.Meta(ge=-1, le=MAX_STEP)]  # -1: none yet
MAX_GENERATIONS: Final = 2**31  # of a run
Generation = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_GENERATIONS)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=2**63 - 1)]
WorldSize = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]  # as many as there can be ranks
Pid = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]  # 0: none
SizeBytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Seq = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Moment = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]  # wall clock, seconds since 1970; 0.0: not reached
MAX_DURATION_S: Final = 1e9
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_DURATION_S)]  # seconds
Incarnation = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Address = Annotated[str, msgspec.Meta(max_length=128)]
EngineAddresses = Mapping[HostId, Address]  # "ip:port"
MAX_COMMAND_ID: Final = 190
CommandId = Annotated[str, msgspec.Meta(max_length=MAX_COMMAND_ID)]
Place = Annotated[str, msgspec.Meta(max_length=32)]


def is_name(name: str) -> bool:
    """Whether a job or a host can have this name."""
    return re.fullmatch(_WHOLE_NAME, name) is not None


def check_name(what: str, name: str) -> str:
    """Return `name` if it can name a job or a host; else raise UsageError with the rules."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            f"{what} {name!r} is not a usable name.",
            hint="use 1 to 63 lower-case letters, digits, '.', '_' or '-', beginning and ending with a letter or digit",
        )
    return name


def run_id(submitted_at: float) -> str:
    """The run id of a job submitted at this time (seconds since 1970): '20251120-104300-123', in UTC."""
    milliseconds = int(submitted_at * 1000)
    day = datetime.fromtimestamp(milliseconds // 1000, tz=UTC)
    return f"{day:%Y%m%d-%H%M%S}-{milliseconds % 1000:03}"


class Fence(msgspec.Struct, frozen=True, order=True):
    """Makes commands stale: the controller's lease epoch counts first, then the job's generation.

    Receivers of commands persist the highest fence per job before acting, and refuse lower ones.
    """

    epoch: Epoch
    generation: Generation


def is_supervisor_url(url: str) -> bool:
    """Whether these are a scheme, a host and perhaps a port. An IPv6 address needs brackets."""
    try:
        found = urlsplit(url)
        return bool(re.fullmatch(r"https?://[^/\s]+/?", url)) and bool(found.port or found.hostname)
    except ValueError:
        return False
