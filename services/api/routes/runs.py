"""Routes of runs to compare: results of the simulator, and how two runs differ."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from services.api.description.openapi import reply_of
from services.api.exchange import Limit, json_response
from services.api.runs import Runs
from services.api.strict_route import user_routes
from services.dashboard.site import RUN_PATTERN
from services.runtime.paging import DEFAULT_LIMIT, Page

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,98}"
SimulationPath = Annotated[str, Path(pattern=f"^{_NAME}$", description="Name of the result.", examples=["llama3"])]
BeforeSimulation = Annotated[
    str, Query(pattern=f"^$|^{_NAME}$", description="Only results before this one: `next_before` of a page.")
]
RunQuery = Annotated[str, Query(pattern=RUN_PATTERN, description="job:NAME, or simulation:NAME for a result.")]


def router(runs: Runs) -> APIRouter:
    routes = user_routes("runs")

    @routes.get("/v1/simulations", responses=reply_of("SimulationPage"))
    async def list_simulations(*, limit: Limit = DEFAULT_LIMIT, before: BeforeSimulation = "") -> Response:
        """List the last results of the simulator by name: the files of the folder `simulations_dir`, which `flyball
        simulate run SCENARIO -o json` writes. A file that is no result is listed with its problem."""
        return json_response(await asyncio.to_thread(runs.simulations, Page(limit, before)))

    @routes.get("/v1/simulations/{name}", responses=reply_of("SimulatedRun"))
    async def get_simulation(name: SimulationPath) -> Response:
        """Show a result of the simulator: its figures, its goodput report, and its time in slices."""
        return json_response(await asyncio.to_thread(runs.simulation, name))

    @routes.get("/v1/goodput/comparison", responses=reply_of("ReportComparison"))
    async def compare_runs(a: RunQuery, b: RunQuery) -> Response:
        """Compare two runs: their measures, and where their time differs, by category and by cause. `b` minus `a`."""
        return json_response(await asyncio.to_thread(runs.compare, a, b))

    return routes
