"""What a campaign draws from its seed, and how it judges what became of each fault."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.errors import NotFound
from simulator.inject.campaign.draws import draw_faults
from simulator.inject.campaign.mixes import LLAMA3, MIXES, mix_of
from simulator.inject.campaign.outcome import CampaignReport, FaultOutcome, FaultVerdict, judge
from simulator.inject.campaign.page import to_html
from simulator.inject.kinds.catalog import KINDS


def test_the_published_interruptions_are_all_there() -> None:
    assert sum(fault.weight for fault in LLAMA3) == 419


@pytest.mark.parametrize("name", MIXES)
def test_every_fault_of_a_mix_exists_with_its_options(name: str) -> None:
    for mixed in MIXES[name]:
        KINDS[mixed.fault].values(mixed.options)


def test_a_mix_may_be_written_out() -> None:
    assert [(f.fault, f.weight) for f in mix_of("kill=2, hang")] == [("kill", 2.0), ("hang", 1.0)]
    for wrong in ("", "llama", "kill=x", "kill=-1", "kill=0,hang=1"):
        with pytest.raises(NotFound, match="There is no mix"):
            mix_of(wrong)


@given(seed=st.integers(0, 10**6), duration_s=st.floats(10, 10_000), longer=st.floats(1, 4))
def test_a_longer_campaign_begins_with_the_same_faults(seed: int, duration_s: float, longer: float) -> None:
    short = draw_faults(LLAMA3, rate_per_h=100, duration_s=duration_s, seed=seed)
    long = draw_faults(LLAMA3, rate_per_h=100, duration_s=duration_s * longer, seed=seed)
    assert long[: len(short)] == short
    assert [d.at_s for d in short] == sorted(d.at_s for d in short)
    assert all(d.at_s < duration_s and 0 <= d.place < 1 for d in short)


def test_as_many_faults_are_drawn_as_the_rate_says() -> None:
    drawn = draw_faults(LLAMA3, rate_per_h=60, duration_s=36_000, seed=1)
    assert 500 < len(drawn) < 700
    by_cause = [d for d in drawn if d.fault.stands_for == "faulty GPU"]
    assert 0.28 < len(by_cause) / len(drawn) < 0.43, "148 of 419"


def incident(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - of an IncidentReply
    usual = {
        "incident_id": "inc-1",
        "cause": "worker_killed",
        "signal": "worker_exited",
        "state": "resolved",
        "host_id": "host-a",
        "opened_at": 100.5,
        "observed_at": 100.25,
        "resolved_at": 103.0,
        "decisions": ["restart_in_place"],
        "lost_steps": 1,
        "message": "Rank 1 was killed.",
        "holding_for": "",
    }
    return usual | fields


def judged(*incidents: dict[str, Any], **fields: Any) -> FaultOutcome:  # noqa: ANN401 - of judge
    usual: dict[str, Any] = {
        "number": 1,
        "fault": "kill",
        "target": "rank 1 on host-a",
        "at": 100.0,
        "host_id": "host-a",
        "causes": ("worker_killed",),
        "trains": True,
        "job_state": "running",
    }
    return judge(incidents=incidents, **(usual | fields))


def test_a_fault_that_is_healed_has_its_times_and_its_cost() -> None:
    outcome = judged(incident())
    assert (outcome.verdict, outcome.why) == (FaultVerdict.RECOVERED, "")
    assert (outcome.detected_as, outcome.detected_s, outcome.recovered_s) == ("worker_killed", 0.25, 3.0)
    assert (outcome.decisions, outcome.lost_steps) == (("restart_in_place",), 1)


@pytest.mark.parametrize(
    ("incidents", "fields", "verdict", "why"),
    [
        ([], {}, FaultVerdict.MISSED, "nothing was noticed"),
        ([], {"causes": ()}, FaultVerdict.TRAINED_ON, ""),
        ([], {"causes": (), "trains": False}, FaultVerdict.WRONG, "no more steps"),
        ([incident(state="escalated")], {}, FaultVerdict.WRONG, "given up"),
        ([incident(state="verifying")], {}, FaultVerdict.WRONG, "still open"),
        ([incident()], {"trains": False}, FaultVerdict.WRONG, "no more steps"),
        ([incident(cause="rank_stalled")], {}, FaultVerdict.WRONG, "taken for rank_stalled"),
        ([incident(host_id="host-b")], {}, FaultVerdict.WRONG, "host-b was blamed"),
        ([incident(cause="rank_stalled", timeline=[{"cause": "worker_killed"}])], {}, FaultVerdict.RECOVERED, ""),
        (
            [incident(), incident(incident_id="inc-2", cause="rank_stalled")],
            {},
            FaultVerdict.RECOVERED,
            "also rank_stalled",
        ),
        (
            [incident(cause="host_silent", host_id="host-b")],
            {"beside": (7,), "causes_beside": ("host_silent",)},
            FaultVerdict.RECOVERED,
            "at the same time as 7",
        ),
        (
            [incident(cause="host_silent")],
            {"causes": (), "beside": (7,), "causes_beside": ("host_silent",)},
            FaultVerdict.TRAINED_ON,
            "",
        ),
        (
            [incident(cause="superseded_workers", host_id="host-c")],
            {"causes": (), "beside": (7,), "causes_beside": ("worker_killed",)},
            FaultVerdict.TRAINED_ON,
            "",
        ),
        ([], {"beside": (7,), "causes_beside": ("host_silent",)}, FaultVerdict.MISSED, "nothing was noticed"),
    ],
)
def test_what_is_missed_or_handled_wrong_is_said(
    incidents: list[dict[str, Any]], fields: dict[str, Any], verdict: FaultVerdict, why: str
) -> None:
    outcome = judged(*incidents, **fields)
    assert outcome.verdict is verdict and why in outcome.why
    assert outcome.verdict.is_failure == (verdict in (FaultVerdict.MISSED, FaultVerdict.WRONG))


OLDER = incident(host_id="host-b", opened_at=90.0, resolved_at=101.0)
BESIDE = {"fault": "nan", "causes": ("loss_diverged",), "beside": (7,), "causes_beside": ("worker_killed",)}


@pytest.mark.parametrize(
    ("moments", "verdict"),
    [
        ([(90.0, "acting"), (95.0, "verifying"), (101.0, "resolved")], FaultVerdict.MISSED),
        ([(90.0, "acting"), (100.5, "verifying"), (101.0, "resolved")], FaultVerdict.RECOVERED),
        ([(90.0, "verifying"), (100.5, "acting"), (101.0, "resolved")], FaultVerdict.RECOVERED),
    ],
)
def test_an_incident_that_was_healed_before_the_fault_struck_does_not_recognise_it(
    moments: list[tuple[float, str]], verdict: FaultVerdict
) -> None:
    timeline = [{"at": at, "state": state, "cause": "worker_killed"} for at, state in moments]
    outcome = judged({**OLDER, "timeline": timeline}, **BESIDE)
    assert (outcome.verdict, outcome.beside) == (verdict, (7,))
    itself = judged({**OLDER, "timeline": timeline}, beside=(7,), causes_beside=("worker_killed",))
    assert itself.verdict is verdict, "nor one of the same cause"


def test_what_another_faults_incident_was_taken_for_at_first_is_no_blame() -> None:
    taken = incident(cause="rank_stalled", timeline=[{"cause": "host_silent"}])
    outcome = judged(taken, causes=(), beside=(7,), causes_beside=("host_silent",))
    assert (outcome.verdict, outcome.incident_ids) == (FaultVerdict.TRAINED_ON, ())


def report(*faults: FaultOutcome) -> CampaignReport:
    return CampaignReport(7, "<gpt>", "llama3", 60.0, 300.0, 1.8e9, 1.8e9 + 300, faults, "")


def test_the_page_begins_with_what_failed_and_trusts_no_name() -> None:
    page = to_html(report(judged(incident()), judged(target="rank <b>")), command="flyball inject campaign --seed 7")
    assert "<h1>1 of 2 faults were missed or handled wrong</h1>" in page
    assert "&lt;gpt&gt;" in page and "<gpt>" not in page and "rank <b>" not in page
    assert "All 1 faults were handled" in to_html(report(judged(incident())), command="")
    assert "No fault was injected" in to_html(report(), command="")
