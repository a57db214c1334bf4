"""Names and the fencing token."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from flyball.contracts.errors import UsageError

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"

# A job or host name is part of file names, segment names and URLs, so its alphabet is theirs.
JobName = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
HostId = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
Step = Annotated[int, msgspec.Meta(ge=0)]


def check_name(what: str, name: str) -> str:
    """Return `name` if it can name a job or a host, else raise UsageError that says what would do."""
    if not re.fullmatch(NAME_PATTERN, name):  # `$` alone lets a newline follow
        raise UsageError(
            f"{what} {name!r} is not a usable name.",
            hint="use 1 to 63 lower-case letters, digits, '.', '_' or '-', beginning and ending with a letter or digit",
        )
    return name


class Fence(msgspec.Struct, frozen=True, order=True):
    """What makes a command stale: the controller's lease epoch first, then the job's generation.

    Whoever obeys commands persists the highest fence per job before acting, and refuses lower ones.
    """

    epoch: int
    generation: int
