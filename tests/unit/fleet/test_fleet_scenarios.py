"""Scenario files: errors name the field, settings go over the file, and what is shipped has its published figures."""

from __future__ import annotations

import pytest

from flyball.contracts.errors import ConfigurationError, NotFound, UsageError
from simulator.fleet import scenario
from simulator.fleet.scenario import Effect

SMALLEST = """
about = "A test."
days = 1.0
[job]
nodes = 4
step_s = 1.0
[cluster]
spares = 1
[checkpoint]
every_s = 10.0
[[causes]]
name = "nic"
effect = "host"
count = 2
"""


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("checkpoint.every_s=0", "checkpoint.every_s: must be above 0"),
        ("checkpoint.every=5", "checkpoint.every: is not a field of a scenario"),
        ("job.nodes=many", "job.nodes: "),
        ("cluster.lemons=2", "cluster.lemons: must be at most 1"),
        ("causes.nic.effect=melt", "causes.nic.effect: must be "),
        ("causes.nic.per_1000_node_days=1", "causes.nic: give one of count and per_1000_node_days"),
        ("job.policy.foo=1", "job.policy: The policy has no setting 'foo'"),
        ("times.stop_s=inf", "times.stop_s: "),
        ("sources=[1]", "sources.0: "),
    ],
)
def test_an_error_names_the_field(setting: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        scenario.parse(SMALLEST, "test", [setting])
    assert told in error.value.message


@pytest.mark.parametrize("setting", ["checkpoint.every_s", "causes.gpu.count=1", "about.x=1", "about.x.y=1"])
def test_a_setting_of_nothing_is_refused(setting: str) -> None:
    with pytest.raises(UsageError):
        scenario.parse(SMALLEST, "test", [setting])


def test_a_missing_field_and_file_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"checkpoint: must be given"):
        scenario.parse(SMALLEST.replace("[checkpoint]\nevery_s = 10.0\n", ""), "test")
    with pytest.raises(NotFound, match="nowhere"):
        scenario.load("nowhere")


def test_settings_go_over_the_file() -> None:
    found = scenario.parse(SMALLEST, "test", ["causes.nic.count=4", "job.nodes=8", "observed={nodes=4, days=2}"])
    assert found.job.nodes == 8
    assert found.rate_per_s(found.causes[0]) == pytest.approx(4 / (4 * 2 * 86_400.0) * 8)


def test_every_field_says_what_it_means() -> None:
    assert [field.name for field in scenario.fields() if not field.meaning] == []


@pytest.mark.parametrize("name", scenario.shipped())
def test_shipped_scenarios_are_valid(name: str) -> None:
    found = scenario.load(name)
    assert found.about.endswith(".")
    assert found.sources or found.assumptions


def test_llama3_has_the_published_counts() -> None:
    found = scenario.load("llama3")
    counts = {cause.name: cause.count or 0.0 for cause in found.causes if cause.effect is not Effect.PLANNED}
    assert (found.gpus, found.days, sum(counts.values()), len(counts)) == (16_384, 54.0, 419, 18)
    assert (counts["faulty-gpu"], counts["gpu-hbm3-memory"], counts["network-switch-or-cable"]) == (148, 72, 35)


@pytest.mark.parametrize(("name", "rate"), [("rsc1", 6.50), ("rsc2", 2.34)])
def test_rsc_has_the_published_rates(name: str, rate: float) -> None:
    assert sum(cause.per_1000_node_days or 0.0 for cause in scenario.load(name).causes) == pytest.approx(rate)


def test_byterobust_has_the_incidents_of_the_job_in_the_mix_of_the_platform() -> None:
    counts = {cause.name: cause.count or 0.0 for cause in scenario.load("byterobust").causes}
    assert sum(counts.values()) == pytest.approx(175, abs=0.05)
    others = ("hang-or-slowdown", "code-that-is-rolled-back", "code-or-data-adjustment")
    assert [counts[name] for name in others] == [15, 12, 20]
    assert counts["cuda-error"] / 128 == pytest.approx(19_968 / 39_687, abs=1e-4)


@pytest.mark.parametrize("name", ["dlrover", "dlrover-before"])
def test_dlrover_loses_eight_per_cent_of_its_gpus_in_a_month(name: str) -> None:
    found = scenario.load(name)
    assert found.rate_per_s(found.causes[0]) * 30 * 86_400.0 == pytest.approx(0.08 * found.gpus, rel=1e-3)


def test_googles_run_has_its_length_and_its_starts() -> None:
    found = scenario.load("google-112")
    assert found.job.nodes == 112
    assert found.length_s == pytest.approx(35_364, abs=1)
    assert (found.causes[0].count, found.checkpoint.every_s) == (47, 20 * found.job.step_s)


def test_transom_saves_twenty_times_as_fast() -> None:
    before, after = (scenario.load(name).checkpoint.save_s for name in ("transom-before", "transom"))
    assert before == 20 * after
