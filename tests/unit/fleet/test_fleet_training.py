"""The closed form of a job's training agrees with one that goes step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.fleet.training import JobTraining, SavedStep


def _training(*, step_s: float, every: int, save_s: float) -> JobTraining:
    return JobTraining(
        step_s=step_s,
        every_steps=every,
        save_s=save_s,
        replicate_s=1.5,
        persistent_every=2,
        persistent_s=3.0,
        at=100.0,
    )


@given(
    step_s=st.floats(0.1, 10.0),
    every=st.integers(1, 7),
    save_s=st.floats(0.0, 5.0),
    share=st.floats(0.01, 0.99),
    steps=st.integers(0, 40),
    restored=st.integers(-1, 30),
)
def test_the_closed_form_agrees_with_steps_one_by_one(
    step_s: float, every: int, save_s: float, share: float, steps: int, restored: int
) -> None:
    training = _training(step_s=step_s, every=every, save_s=save_s)
    training.begin(100.0, 1, SavedStep(restored))
    at, done, saves, stored = 100.0, restored, [SavedStep(restored)], [(0.0, SavedStep())]
    for _ in range(steps):
        at += step_s
        done += 1
        assert training.completed_at(done) == pytest.approx(at)
        if (done + 1) % every == 0:
            at += save_s
            saves.append(SavedStep(done, 1))
            if (done + 1) % (2 * every) == 0:
                stored.append((at + 3.0, saves[-1]))
    moment = at + share * step_s
    assert training.step_at(moment) == done
    assert training.committed_at(moment) == saves[-1]
    if all(abs(complete_at - moment) > 1e-6 for complete_at, _ in stored):
        assert training.persistent_at(moment) == [step for complete_at, step in stored if complete_at < moment][-1]
    training.stop(moment)
    assert training.spent.total_s == pytest.approx(moment - 100.0)
    assert training.spent.useful_s == pytest.approx(steps * step_s)
    assert training.spent.saving_s == pytest.approx((len(saves) - 1) * save_s)


def test_a_restart_makes_steps_recomputed() -> None:
    training = _training(step_s=1.0, every=5, save_s=0.0)
    training.begin(100.0, 1, SavedStep())
    training.stop(108.5)
    assert (training.newest, training.committed, training.replicated) == (7, SavedStep(4, 1), SavedStep(4, 1))
    training.begin(120.0, 2, training.replicated)
    training.end(121.0)
    assert training.spent.useful_s == pytest.approx(6.0)
    assert training.spent.recomputed_s == pytest.approx(3.5)
    assert training.spent.down_s == pytest.approx(11.5)


def test_tiers_lag_behind_memory() -> None:
    training = _training(step_s=1.0, every=5, save_s=0.0)
    training.begin(100.0, 1, SavedStep())
    at = 116.0  # saved at 105, 110 and 115
    assert training.committed_at(at) == SavedStep(14, 1)
    assert training.replicated_at(at) == SavedStep(9, 1)
    assert training.persistent_at(at) == SavedStep(9, 1)
    assert training.persistent_at(112.0) == SavedStep()
