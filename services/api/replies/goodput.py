"""The reply about goodput. Loads the calculator: imported only when somebody asks for its schema."""

from __future__ import annotations

import msgspec

from goodput.account.timeline_bins import TimelineBin
from goodput.calculator import GoodputReport


class GoodputReply(GoodputReport, frozen=True, kw_only=True):
    """How much of the elapsed time became training, and where the rest went."""

    timeline: tuple[TimelineBin, ...] | msgspec.UnsetType = msgspec.UNSET  # with `timeline_bins` only
