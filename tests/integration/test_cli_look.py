"""What `flyball get`, `describe` and `watch` show of a real supervisor."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.commands.here import run_here
from support.servers.here import supervisor_in

from flyball.cli.look.kinds import NAMES
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.event_stream import follow
from flyball.contracts.cluster import JobSpec
from flyball.contracts.events import Event, EventKind
from services.main import Supervisor

DEADLINE_S = 300.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    with ExitStack() as running:
        patient = {"start_timeout_s": DEADLINE_S, "drain_timeout_s": 1.0}
        yield lambda port=0: running.enter_context(supervisor_in(tmp_path / "supervisor", port=port, **patient))


def test_every_kind_is_listed_and_a_stream_goes_on_after_a_restart(
    tmp_path: Path, start: Callable[..., Supervisor]
) -> None:
    supervisor = start()
    environment = {
        **{"FLYBALL_SUPERVISOR": supervisor.url, "FLYBALL_TOKEN": supervisor.token},
        **{"FLYBALL_STATE_DIR": str(tmp_path), "COLUMNS": "200"},
    }

    def flyball(*words: str) -> Any:  # noqa: ANN401 - the process, or its JSON
        done = run_here(*words, environment=environment)
        return json.loads(done.stdout) if "json" in words else done

    with ApiClient(supervisor.url, supervisor.token) as client:
        client.post("/v1/jobs", JobSpec(job="llama", argv=("train.py",), workdir="/", nnodes=1, nproc_per_node=1))
        for kind in NAMES:
            assert f"{kind.capitalize()}" in flyball("get", kind).stdout
            assert isinstance(flyball("get", kind, "-o", "json")["items"], list)
        assert [job["job"] for job in flyball("get", "jobs", "-o", "json")["items"]] == ["llama"]
        assert flyball("get", "audit", "-o", "json")["items"][0]["operation"] == "submitJob"
        assert "Checkpoints: hosts report none to resume from" in flyball("describe", "job", "llama").stdout
        assert "did you mean llama?" in flyball("describe", "job", "lama").stderr
        assert "did you mean incidents?" in flyball("get", "incidnts").stderr
        assert f"The kinds are {', '.join(NAMES)}." in flyball("get", "pods").stderr
        assert "--host does not apply to jobs" in flyball("get", "jobs", "--host", "host-a").stderr
        _check_stream(client, supervisor, start)


def _check_stream(client: ApiClient, supervisor: Supervisor, start: Callable[..., Supervisor]) -> None:
    lost: list[str] = []
    fault = EventKind.FAULT_INJECTED
    seen: list[Any] = []
    found = follow(client, after=0, kinds=[fault.value], lost=lambda error: lost.append(error.message))
    has_begun = threading.Event()

    def read() -> None:
        for one in islice(found, 2):
            seen.append(one)
            has_begun.set()

    reader = threading.Thread(target=read, daemon=True)
    port = int(supervisor.url.rpartition(":")[2])
    with ApiClient(supervisor.url, supervisor.token) as other:
        other.post("/v1/events", [Event(1.0, fault, "llama", data={"fault": "kill", "target": "rank 0"})])
    reader.start()
    assert has_begun.wait(DEADLINE_S)
    supervisor.stop()
    again = start(port)
    with ApiClient(again.url, again.token) as other:
        other.post("/v1/events", [Event(2.0, fault, "llama", data={"fault": "hang", "target": "rank 0"})])
    reader.join(DEADLINE_S)
    assert [one.event["data"]["fault"] for one in seen] == ["kill", "hang"], lost
