"""torchrun's flags for the workers' output: which streams of which ranks reach the terminal, and how. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Template

import msgspec

from flyball.contracts.errors import UsageError
from flyball.contracts.on_host.console_request import BOTH

ALL_RANKS = -1
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


class Console(msgspec.Struct, frozen=True):
    """The streams of local ranks to show, as with torchrun."""

    only: tuple[int, ...] = ()  # (): all
    redirects: Mapping[int, int] = {}  # local rank or ALL_RANKS -> streams that go to the log only
    tee: Mapping[int, int] = {}  # likewise -> streams shown in whole lines with a prefix
    prefix: str = ""  # template of that prefix; '': torchrun's

    def raw(self, local_rank: int) -> int:
        """The streams of this rank that are shown unchanged."""
        return BOTH & ~(_of(self.redirects, local_rank) | _of(self.tee, local_rank)) if self._is_on(local_rank) else 0

    def prefixed(self, local_rank: int) -> int:
        """The streams of this rank that are shown in whole lines with a prefix."""
        return _of(self.tee, local_rank) if self._is_on(local_rank) else 0

    def shows(self, local_rank: int) -> int:
        """The streams of this rank that are shown at all."""
        return self.raw(local_rank) | self.prefixed(local_rank)

    def line_prefix(self, *, rank: int, local_rank: int, role: str) -> bytes:
        """The prefix of each line of a stream that is shown with one."""
        template = self.prefix or "[${role_name}${local_rank}]:"
        filled = Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
        return filled.encode(errors="replace")

    def _is_on(self, local_rank: int) -> bool:
        return not self.only or local_rank in self.only


def _of(streams: Mapping[int, int], local_rank: int) -> int:
    return streams.get(local_rank, streams.get(ALL_RANKS, 0))


def parse_console(redirects: str, tee: str, local_ranks_filter: str, environ: Mapping[str, str]) -> Console:
    """Parse the values of torchrun's flags. Raises UsageError."""
    only: tuple[int, ...] = ()
    if local_ranks_filter:
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", local_ranks_filter):
            raise UsageError(
                f"--local-ranks-filter {local_ranks_filter} is not a list of ranks.",
                hint="for example --local-ranks-filter 0,1",
            )
        only = tuple(int(part) for part in local_ranks_filter.split(","))
    return Console(
        only, _streams("--redirects", redirects), _streams("--tee", tee), prefix=environ.get(PREFIX_VARIABLE, "")
    )


def _streams(flag: str, text: str) -> dict[int, int]:
    """torchrun's notation for streams: "0".."3" for all ranks, or RANK:DIGIT,..."""
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(f"{flag} {text} is not of the form 3 or 0:3,1:0.", hint="0 none, 1 stdout, 2 stderr, 3 both")
    if ":" not in text:
        return {ALL_RANKS: int(text)}
    return {int(rank): int(word) for rank, word in (part.split(":") for part in text.split(","))}
