"""Injects through agents: each fault through the agent on whose machine it is to happen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from flyball.contracts.errors import FlyballError, NotFound
from flyball.contracts.wire import convert
from simulator.inject.faults import Api, host_of_rank
from simulator.inject.injector import FaultRequest, InjectedFault


class AgentApi(Protocol):
    """An agent's HTTP API; raises FlyballError. `flyball.cli.reach.client.ApiClient` implements it."""

    def get(self, path: str) -> Any: ...  # noqa: ANN401 - JSON

    def post(self, path: str, body: object = None) -> Any: ...  # noqa: ANN401 - JSON

    def delete(self, path: str) -> None: ...


class Agents:
    def __init__(self, supervisor: Api, agents: Sequence[AgentApi]) -> None:
        self._supervisor = supervisor
        self._agents = agents
        self._owners: dict[str, AgentApi] = {}  # of the injections that may still last

    def inject(self, request: FaultRequest) -> InjectedFault:
        """Raises what the agent answers, and NotFound if none serves the host."""
        host_id = request.host_id or (
            host_of_rank(self._supervisor, request.job, request.rank) if request.rank >= 0 else ""
        )
        agent = self._agent_of(host_id)
        done = convert(agent.post("/v1/injections", request), InjectedFault)
        if done.lasts_s:
            self._owners[done.injection_id] = agent
        return done

    @property
    def active(self) -> Sequence[str]:
        """The injections that last at the moment."""
        found: list[str] = []
        for agent in self._agents:
            found += agent.get("/v1/injections")
        return found

    def undo_all(self) -> None:
        """Undo all that was injected here; an agent that is gone undoes its own."""
        while self._owners:
            injection_id, agent = self._owners.popitem()
            try:
                agent.delete(f"/v1/injections/{injection_id}")
            except FlyballError:
                continue

    def _agent_of(self, host_id: str) -> AgentApi:
        if not host_id:
            return self._agents[0]  # of the services: name the agent on their machine first
        for agent in self._agents:
            if host_id in agent.get("/v1/hosts"):
                return agent
        raise NotFound(
            f"No agent runs where host {host_id} does.", hint="start `flyball inject agent` there, and name it"
        )
