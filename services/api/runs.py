"""The runs that can be looked at and compared: jobs, `job:NAME`, and results of the simulator, `simulation:NAME`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flyball.contracts import wire
from goodput.account.options import AccountOptions
from services.api.goodput import Asked, GoodputReports
from services.api.ports import Json
from services.runtime.paging import MAX_LIMIT, Page

if TYPE_CHECKING:  # loads the calculator: see goodput.py
    from goodput.read.simulations import SimulationFolder


WHOLE = Page(MAX_LIMIT)


class Runs:
    """All methods block: call them in threads. Raise NotFound; InvalidMessage for a file that is no result;
    ReportsBusy."""

    def __init__(self, goodput: GoodputReports, simulations: Path) -> None:
        """`simulations`: the folder of results."""
        self._goodput = goodput
        self._path = simulations

    @cached_property
    def _folder(self) -> SimulationFolder:
        from goodput.read.simulations import SimulationFolder

        return SimulationFolder(self._path)

    def of_job(self, job: str, options: AccountOptions, bins: int = 0, *, all_runs: bool = False) -> Json:
        """Return the goodput report of a job's newest run, or of all, with its timeline if `bins` is not 0."""
        return self._goodput.report(job, Asked(options, all_runs, bins))

    def compare(self, a: str, b: str) -> Json:
        """Return how run `b` differs from run `a`."""
        from goodput.calculator import GoodputReport
        from goodput.comparison import compare

        one, other = (wire.convert(self._report(run), GoodputReport) for run in (a, b))
        found: Json = msgspec.to_builtins(compare(one, other))
        return found

    def _report(self, run: str) -> Json:
        kind, _, name = run.partition(":")
        found: Json = self.of_job(name, AccountOptions()) if kind == "job" else self.simulation(name)["goodput"]
        return found

    def simulations(self, page: Page = WHOLE) -> Json:
        """Return a page of the results in the folder, by name."""
        listed, left_out = self._folder.summaries()
        upto = [one for one in listed if not page.before or one.name < page.before]
        items = upto[-page.limit :]
        return {
            "items": msgspec.to_builtins(items),
            "next_before": items[0].name if len(upto) > len(items) else None,
            "folder": str(self._path),
            "left_out": left_out,
        }

    def simulation(self, name: str) -> Json:
        """Return one result."""
        found: Json = msgspec.to_builtins(self._folder.result(name))
        return found
