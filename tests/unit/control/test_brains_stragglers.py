"""What the policy does about a rank that all others wait for."""

from __future__ import annotations

import msgspec
from support.policy.checked import decide
from support.policy.views import HOSTS, JOB, NOW, SETTINGS, decided, say, view

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.decisions import DecisionKind, IncidentState
from flyball.contracts.reports.training_health import Straggler, StragglerRecovered
from services.controller.round.view import PastFailure

# A step of the job takes 9.99 s: it made ten in 99.9 s.
SLOW = Straggler("job", 2, 1, 6.0, 4.0, 2, 5, 20)
COPIES = tuple(ShardCopy("job", 2, 50, r, Tier.MEMORY, host, 1, "d") for r, host in ((0, "a"), (1, "b")))


def test_a_straggler_moves_to_a_spare_if_that_gains_more_than_it_costs() -> None:
    outcome = decide(view(copies=COPIES), [say(SLOW, source="sensor.1")], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.rule, decision.kind) == ("move_the_straggler", DecisionKind.MIGRATE_TO_SPARE)
    assert (decision.evidence["gain_s"], decision.evidence["cost_s"]) == (720.7, 20.0)
    assert decision.action is not None and decision.action.next is not None
    assert [part.host_id for part in decision.action.next.hosts] == ["a", "c"]
    assert decision.action.next.restart_count == 1  # not charged
    (incident,) = outcome.incidents
    assert (incident.cause, incident.host_id, incident.state) == ("straggler", "b", IncidentState.ACTING)


def test_it_stays_if_the_move_costs_more() -> None:
    mild = msgspec.structs.replace(SLOW, compute_s=4.05)
    decision = decided(decide(view(copies=COPIES), [say(mild)], SETTINGS, NOW))
    assert (decision.rule, decision.action) == ("hold_if_a_move_costs_more", None)
    old = tuple(msgspec.structs.replace(copy, step=45) for copy in COPIES)  # five steps to redo
    redone = decided(decide(view(copies=old), [say(msgspec.structs.replace(mild, compute_s=4.1))], SETTINGS, NOW))
    assert redone.rule == "hold_if_a_move_costs_more"


def test_without_a_spare_it_waits_for_one() -> None:
    outcome = decide(view(hosts=HOSTS[:2], copies=COPIES), [say(SLOW)], SETTINGS, NOW)
    assert decided(outcome).rule == "hold_without_a_spare"
    again = decide(view(incidents=outcome.incidents, copies=COPIES), [], SETTINGS, NOW + 10)
    assert decided(again).rule == "move_the_straggler"


def test_a_rank_that_was_slow_on_another_host_too_stays() -> None:
    job = msgspec.structs.replace(JOB, failures=(PastFailure(1, "straggler", "1", "", -1),))
    decision = decided(decide(view(job=job, copies=COPIES), [say(SLOW)], SETTINGS, NOW))
    assert decision.rule == "hold_if_a_move_did_not_help"
    other = msgspec.structs.replace(JOB, failures=(PastFailure(1, "straggler", "0", "", -1),))
    assert decided(decide(view(job=other, copies=COPIES), [say(SLOW)], SETTINGS, NOW)).rule == "move_the_straggler"


def test_signals_of_other_generations_and_repeated_ones_change_nothing() -> None:
    old = say(msgspec.structs.replace(SLOW, generation=1))
    assert decide(view(), [old], SETTINGS, NOW).empty
    held = decide(view(hosts=HOSTS[:2], copies=COPIES), [say(SLOW)], SETTINGS, NOW).incidents
    assert not decide(view(hosts=HOSTS[:2], incidents=held, copies=COPIES), [say(SLOW)], SETTINGS, NOW).decisions


def test_the_incident_ends_with_its_generation() -> None:
    held = decide(view(hosts=HOSTS[:2], copies=COPIES), [say(SLOW)], SETTINGS, NOW).incidents
    assert JOB.generation is not None
    newer = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(JOB.generation, generation=3))
    (incident,) = decide(view(job=newer, incidents=held, copies=COPIES), [], SETTINGS, NOW).incidents
    assert incident.state is IncidentState.RESOLVED


def test_a_straggler_that_recovers_moves_nothing_when_a_spare_comes() -> None:
    held = decide(view(hosts=HOSTS[:2], copies=COPIES), [say(SLOW)], SETTINGS, NOW).incidents
    other = say(StragglerRecovered("job", 2, 0, 5), source="sensor.1")
    assert not decide(view(hosts=HOSTS[:2], incidents=held, copies=COPIES), [other], SETTINGS, NOW).incidents
    recovered = say(StragglerRecovered("job", 2, 1, 5), source="sensor.1")
    outcome = decide(view(incidents=held, copies=COPIES), [recovered], SETTINGS, NOW + 10)
    assert [i.state for i in outcome.incidents] == [IncidentState.RESOLVED] and not outcome.decisions


def test_a_straggler_that_nobody_names_again_moves_nothing() -> None:
    held = decide(view(hosts=HOSTS[:2], copies=COPIES), [say(SLOW)], SETTINGS, NOW).incidents
    late = NOW + 900.0 + 10 * 20 * 6.0
    stale = decide(view(incidents=held, copies=COPIES), [], SETTINGS, late)
    assert [i.state for i in stale.incidents] == [IncidentState.RESOLVED] and not stale.decisions
    again = say(msgspec.structs.replace(SLOW, compute_s=7.0), seq=2)
    renewed = decide(view(hosts=HOSTS[:2], incidents=held, copies=COPIES), [again], SETTINGS, late - 1).incidents
    assert [i.excess_s for i in renewed] == [3.0]
    assert not decide(view(hosts=HOSTS[:2], incidents=renewed, copies=COPIES), [], SETTINGS, late).incidents
