"""All clocks of an incident begin at its fault, and their parts add up."""

from __future__ import annotations

import msgspec
from support.stores.made_values import Make

from flyball.contracts.decisions import IncidentState
from services.rules.incident_clock import IncidentPart, durations_s, fault_at, parts

OPEN, DECIDING, ACTING = IncidentState.OPEN, IncidentState.DECIDING, IncidentState.ACTING
VERIFYING, RESOLVED = IncidentState.VERIFYING, IncidentState.RESOLVED


def test_the_parts_add_up_to_the_whole() -> None:
    changes = [(12.6, OPEN), (12.6, ACTING), (12.7, DECIDING), (12.8, ACTING), (13.0, VERIFYING), (13.1, RESOLVED)]
    found = durations_s(parts(10.0, changes))
    assert list(found) == ["undetected", "acting", "deciding", "verifying"]
    assert abs(sum(found.values()) - 3.1) < 1e-9
    assert abs(found["acting"] - 0.3) < 1e-9


def test_what_lasts_still_lasts_until_now() -> None:
    changes = [(5.0, OPEN), (6.0, DECIDING)]
    assert parts(4.0, changes) == [IncidentPart("undetected", 4.0, 5.0), IncidentPart("deciding", 5.0, 6.0)]
    assert parts(4.0, changes, now=9.0)[-1] == IncidentPart("deciding", 5.0, 9.0)


def test_no_part_is_negative_if_the_fault_was_seen_by_a_clock_that_is_ahead() -> None:
    assert parts(7.0, [(5.0, ACTING), (8.0, RESOLVED)]) == [IncidentPart("acting", 7.0, 8.0)]


def test_an_incident_of_an_earlier_release_began_when_it_was_observed() -> None:
    incident = Make().incident(observed_at=3.0, opened_at=4.0)
    assert fault_at(incident) == 3.0
    assert fault_at(msgspec.structs.replace(incident, fault_at=1.0)) == 1.0
    assert fault_at(msgspec.structs.replace(incident, observed_at=0.0)) == 4.0
