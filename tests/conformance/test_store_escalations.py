"""Escalations reach a real HTTP receiver: signed, in order, again after a failure, once after a restart."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.http_receiver import DEADLINE_S, Receiver

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import Alternative, Decision, DecisionKind
from flyball.contracts.errors import ConfigurationError
from flyball.contracts.events import Event, EventKind
from services.api.outgoing.webhook import Webhook, check_url
from services.controller.round.view import JobChange
from services.store.read import unsent_events as unsent_module
from services.store.read.escalations import SqlEscalations

SECRET = "a secret of the receiver"


class HastyStop(threading.Event):
    """Whoever waits for it in vain waits a hundredth of the time."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(None if timeout is None else timeout / 100)


@pytest.fixture
def sending(stores, clock) -> Iterator[Any]:
    """Run a webhook of the leading controller against a receiver until the test ends."""
    running: list[tuple[threading.Event, threading.Thread]] = []
    receivers: list[Receiver] = []

    def send(*statuses: int, holder: str = "controller#1") -> Receiver:
        receiver = Receiver(*statuses)
        receivers.append(receiver)
        found = SqlEscalations(stores.db, holder)
        assert found.following() is None, "what happened before is no news"
        hook = Webhook(url=f"{receiver.url}/alerts", secret=SECRET, escalations=found, clock=clock)
        stop = HastyStop()
        thread = threading.Thread(target=hook.run, args=(stop,))
        thread.start()
        running.append((stop, thread))
        return receiver

    def stop_all() -> None:
        for stop, thread in running:
            stop.set()
            thread.join(DEADLINE_S)

    send.stop = stop_all  # type: ignore[attr-defined]
    yield send
    stop_all()
    for receiver in receivers:
        receiver.close()


def fail(stores, make, number: int = 3) -> None:
    """The controller fails the job, because of its incident."""
    weighed = (Alternative(DecisionKind.FAIL_JOB, 3600.0, "All ranks stand.", is_chosen=True),)
    decision = Decision(
        f"dec-{number}", "inc-1", "job", DecisionKind.FAIL_JOB, "It failed again.", "fail_on_identical_exception",
        make.T, {"times": 2}, None, weighed,
    )  # fmt: skip
    stores.commit(
        incidents=(make.incident(1, "escalated", action_id="act-2", resolved_at=make.T),),
        decisions=(decision,),
        jobs=(JobChange("job", JobState.FAILED, "It failed again."),),
    )


def test_a_failed_job_is_told_once_with_its_incident_decisions_and_evidence(stores, make, sending) -> None:
    stores.run_job()
    stores.begin_restart()
    receiver = sending()
    fail(stores, make)
    (story,) = map(json.loads, receiver.received(1))
    assert (story["event"], story["job"]["job"], story["job"]["state"]) == ("job_failed", "job", "failed")
    assert "spec" not in story["job"]
    assert (story["incident"]["incident_id"], story["incident"]["state"]) == ("inc-1", "escalated")
    assert [d["decision_id"] for d in story["decisions"]] == ["dec-2", "dec-3"]
    assert story["decisions"][-1]["evidence"] == {"times": 2}
    assert story["decisions"][-1]["alternatives"][0]["expected_cost_gpu_s"] == 3600.0
    path, headers, body = receiver.requests[0]
    assert path == "/alerts"
    signed = f"{headers['Flyball-Timestamp']}.".encode() + body
    expected = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
    assert headers["Flyball-Signature"] == f"sha256={expected}"
    assert headers["Flyball-Delivery"] == str(story["delivery"])

    sending.stop()
    again = SqlEscalations(stores.db, "controller#1")
    assert again.following() is None, "a restarted webhook does not tell it again, nor the escalated incident"


def test_a_receiver_that_fails_gets_it_again_and_one_that_refuses_does_not(stores, make, sending) -> None:
    stores.run_job()
    stores.begin_restart()
    receiver = sending(500, 429, 400)
    fail(stores, make)
    assert len({json.loads(story)["delivery"] for story in receiver.received(3)}) == 1
    stores.commit(incidents=(make.incident(2, "acting"),))
    stores.commit(incidents=(make.incident(3, "deciding", job="", host_id="host-a"),))
    stores.commit(incidents=(make.incident(3, "escalated", job="", host_id="host-a", resolved_at=make.T),))
    stories = [json.loads(body) for body in receiver.received(4)]
    assert stories[3]["event"] == "incident_escalated" and stories[3]["incident"]["incident_id"] == "inc-3"
    assert stories[3]["delivery"] > stories[2]["delivery"]


def test_only_the_leaders_webhook_sends(stores, make, sending) -> None:
    stores.run_job()
    stores.begin_restart()
    other = sending(holder="another#1")
    leading = sending()
    fail(stores, make)
    leading.received(1)
    assert other.requests == []


def test_the_position_follows_a_busy_log_without_a_write_at_each_look(stores, make, monkeypatch) -> None:
    monkeypatch.setattr(unsent_module, "NOTED_EVERY", 10)
    stores.lead()
    found = SqlEscalations(stores.db, "controller#1")
    written: list[int] = []
    write = found.passed
    monkeypatch.setattr(found, "passed", lambda number: (written.append(number), write(number)))
    start = stores.log.last()

    def happen(count: int, kind: EventKind = EventKind.STEPS) -> None:
        stores.log.append([Event(make.T, kind, "job", data={"outcome": "completed"}) for _ in range(count)])
        assert found.following() is None

    for count in (0, 9, 1, 0, 9, 1):
        happen(count)
    assert written == [start, start + 10, start + 20]
    happen(1, EventKind.JOB_ENDED)
    happen(0)
    assert written[3:] == [start + 21], "a job that completed is nobody's news, and is not read again"


@pytest.mark.parametrize("url", ["alerts.example", "ftp://alerts.example/x", "https://"])
def test_a_wrong_url_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigurationError, match="webhook_url"):
        check_url(url)
