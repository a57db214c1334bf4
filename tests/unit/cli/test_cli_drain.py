"""`flyball drain`: its messages while it waits, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
from support.clocks.manual import ManualClock

from flyball.cli.act import drain
from flyball.cli.main import run_cli
from flyball.contracts.errors import Conflict, Unreachable


class Api:
    """Returns the host's states one after the other, then the last one again and again."""

    def __init__(self, *states: str | None) -> None:
        self._states = list(states)

    def get(self, _path: str) -> dict[str, Any]:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        wish = None if state is None else {"state": state, "message": "It is refused: no spare.", "requested_at": 1.0}
        return {"host_id": "host-b", "state": "healthy", "reason": "it reported", "ranks": [1], "drain": wish}

    def items(self, path: str) -> list[dict[str, Any]]:
        if path == "/v1/incidents":
            return [{"incident_id": "inc-3", "host_id": "host-b"}, {"incident_id": "inc-4", "host_id": "host-c"}]
        decisions = (("dec-1", "inc-3"), ("dec-2", "inc-4"), ("dec-3", "inc-3"), ("dec-4", ""))
        return [
            {"decision_id": d, "incident_id": i, "kind": "hold", "reason": f"{d} says", "evidence": {"host": "host-b"}}
            | {"at": float(d[-1])}
            | ({"evidence": {}} if i else {})
            for d, i in decisions
        ]


def wait(*states: str | None, clock: ManualClock | None = None) -> dict[str, Any]:
    api: Any = Api(*states)
    return drain.await_drain(api, "host-b", {"dec-1"}, 60.0, clock=clock or ManualClock())


def test_each_decision_about_the_host_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert wait("requested", "requested", "drained")["host_id"] == "host-b"
    printed = capsys.readouterr().err.splitlines()
    assert printed == [f"flyball: dec-{n} hold at 00:00:0{n}.000 UTC: dec-{n} says" for n in (3, 4)]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("requested", "refused"), "no spare"),
        (("cancelled",), "cancelled the drain"),
        (("requested", None), "cancelled the drain"),
    ],
)
def test_a_refused_or_cancelled_drain_is_an_error(states: tuple[str | None, ...], expected: str) -> None:
    with pytest.raises(Conflict, match=expected):
        wait(*states)


def test_the_wait_has_a_deadline() -> None:
    clock = ManualClock(0.0)
    with pytest.raises(Unreachable, match="not drained yet"):
        wait("requested", clock=clock)
    assert clock.now_s == pytest.approx(60.0 + drain.MOVE_MARGIN_S, abs=2 * drain.LOOK_INTERVAL_S)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("drain Not_A/Host", "not a usable name"),
        ("drain host-b --cancel --reason x", "takes no reason"),
        ("drain host-b --deadline 0", "--deadline"),
        ("drain host-b --within 0", "--within"),
    ],
)
def test_wrong_usage(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(line.split()) == 2
    assert expected in capsys.readouterr().err
