"""The replies about goodput. Loads the calculator: imported only when somebody asks for their schemas."""

from __future__ import annotations

import msgspec

from goodput.account.timeline_bins import TimelineBin
from goodput.calculator import GoodputReport
from goodput.read.simulations import SimulationSummary
from services.api.replies.fields import Cursor


class GoodputReply(GoodputReport, frozen=True, kw_only=True):
    """How much of the elapsed time became training, and where the rest went."""

    timeline: tuple[TimelineBin, ...] | msgspec.UnsetType = msgspec.UNSET  # with `timeline_bins` only


class SimulationPage(msgspec.Struct, frozen=True):
    """Results of the simulator, by name."""

    items: tuple[SimulationSummary, ...]
    next_before: Cursor
    folder: str  # where they are
    left_out: int  # files that were written before those, beyond the limit
