"""Searches for the save interval, the spares and the replicas that are best for a scenario, and is honest about noise.

A closed form says where to begin. Candidates run with the same seeds; those that are worse beyond doubt are dropped,
the others get more seeds. What was found then meets the scenario as it is on seeds that the search never saw, because
the best of many candidates looks better than it is on the seeds that chose it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from flyball.contracts.errors import UsageError
from goodput.predict.prediction import daly_interval_s, young_interval_s
from simulator.fleet.scenario import Effect, FaultReach, FleetScenario
from simulator.planning import paired
from simulator.planning.comparison import Side, compare
from simulator.planning.goal import Goal, Prices, score
from simulator.planning.optimum import (
    NEGLIGIBLE,
    CandidatePoint,
    ClosedForm,
    Optimum,
    SearchedField,
    optimum_of,
    plain,
)
from simulator.planning.outcome import RunOutcome

FIRST_SEEDS = 4  # of every candidate
_LADDER = (0.25, 0.5, 0.707, 1.0, 1.414, 2.0, 4.0)  # of the closed form's interval
_EXTENSIONS = 2  # of the ladder, while its best is at an end
_QUANTILES = (0.5, 0.9, 0.99, 0.999, 0.9999)  # of the hosts that are broken at once
_MOST_REPLICAS = 3

# Runs scenarios with seeds; the text says what for. Returns the outcomes of each scenario by seed.
RunMany = Callable[[str, Sequence[FleetScenario], Sequence[int]], list[list[RunOutcome]]]


class Search:
    """One search. `seeds` is the number of seeds of each candidate that is not dropped."""

    def __init__(
        self, scenario: FleetScenario, *, goal: Goal, prices: Prices, first_seed: int, seeds: int, run: RunMany
    ) -> None:
        if seeds < FIRST_SEEDS:
            raise UsageError(f"A search needs {FIRST_SEEDS} seeds or more.", hint=f"give --seeds {FIRST_SEEDS}")
        every_s = _whole_steps(scenario.checkpoint.every_s, scenario.job.step_s)  # as the job takes it
        self._scenario = _with(scenario, "checkpoint.every_s", plain(every_s))
        self._goal, self._prices = goal, prices
        self._first_seed, self._seeds, self._run = first_seed, seeds, run
        self._score = score(goal, prices)
        self._known: dict[str, list[RunOutcome]] = {}  # by scenario, in the order of the seeds

    def find(self, name: str, settings: Sequence[str]) -> Optimum:
        """Search, and check what was found on other seeds."""
        pilot = self._outcomes("the scenario as it is", [self._scenario], FIRST_SEEDS)[0]
        closed = self._closed_form(pilot)
        notes: list[str] = []
        fields: list[SearchedField] = []
        chosen = self._scenario
        for search in (self._spares, self._interval, self._replicas):
            found = search(chosen, closed, notes)
            if found is not None:
                fields.append(found)
                chosen = _with(chosen, found.field, found.chosen)
        confirmed = None
        if chosen != self._scenario:
            fresh = range(self._first_seed + self._seeds, self._first_seed + 2 * self._seeds)
            a, b = self._run("the check on other seeds", [self._scenario, chosen], fresh)
            changed = [f"{field.field}={field.chosen}" for field in fields if field.chosen != field.given]
            sides = Side("A", name, tuple(settings), tuple(a)), Side("B", name, (*settings, *changed), tuple(b))
            confirmed = compare(*sides, self._prices)
        runs = sum(map(len, self._known.values())) + (2 * self._seeds if confirmed else 0)
        return optimum_of(
            name=name,
            settings=settings,
            goal=self._goal,
            prices=self._prices,
            closed=closed,
            fields=fields,
            confirmed=confirmed,
            notes=notes,
            runs=runs,
        )

    # --- the three searches ------------------------------------------------------------------------------------------

    def _interval(self, scenario: FleetScenario, closed: ClosedForm, notes: list[str]) -> SearchedField | None:
        checkpoint, step_s = scenario.checkpoint, scenario.job.step_s
        if closed.daly_s is None:
            notes.append("No fault interrupted the job: its save interval does not matter.")
            return None
        least_s = max(step_s, checkpoint.replicate_s if checkpoint.replicas else 0.0)
        start_s = max(least_s, closed.daly_s)

        def whole_steps(seconds: float) -> float:
            return _whole_steps(seconds, step_s, least=math.ceil(least_s / step_s - 1e-9))

        tried = {whole_steps(start_s * factor) for factor in _LADDER} | {whole_steps(checkpoint.every_s)}
        why = (
            f"started from Daly's {plain(closed.daly_s)} s; not below {plain(least_s)} s, when the replicas of the "
            "save before are complete"
        )
        for _ in range(_EXTENSIONS):
            found = self._race("checkpoint.every_s", scenario, tried, why, prefers_small=False)
            best = float(found.chosen)
            longer = best == max(tried)
            if not longer and (best > min(tried) or best <= whole_steps(least_s)):
                break
            tried |= {whole_steps(best * (factor if longer else 1.0 / factor)) for factor in (2.0, 4.0)}
        else:
            found = self._race("checkpoint.every_s", scenario, tried, why, prefers_small=False)
        return found

    def _spares(self, scenario: FleetScenario, closed: ClosedForm, notes: list[str]) -> SearchedField:
        mean, burst = _broken_at_once(scenario)
        broken = {poisson_quantile(mean, share) for share in _QUANTILES}
        tried = broken | {count + burst for count in broken} | {scenario.cluster.spares}
        if self._goal is Goal.COST:
            tried.add(0)
        why = f"started from the {mean:.1f} hosts that are broken at once on average, a Poisson variable"
        if burst:
            why += f", without and with the other {burst} hosts of a rack"
        return self._race("cluster.spares", scenario, tried, why, prefers_small=True)

    def _replicas(self, scenario: FleetScenario, closed: ClosedForm, notes: list[str]) -> SearchedField:
        notes.append(
            "A replica takes memory of a host, which the scenario has no price for. It costs no training time here but "
            "checkpoint.replicate_s, which stays the same for any number of them."
        )
        return self._race(
            "checkpoint.replicas",
            scenario,
            set(range(_MOST_REPLICAS + 1)),
            "all numbers that the scenario allows",
            prefers_small=True,
        )

    # --- racing ------------------------------------------------------------------------------------------------------

    def _race(
        self, field: str, scenario: FleetScenario, values: Iterable[float], why: str, *, prefers_small: bool
    ) -> SearchedField:
        """Run candidates, with more seeds for those that may be best. `prefers_small`: take the smallest value of
        those that lose next to nothing, else the given one if it does."""
        ascending = sorted(values)
        scenarios = [_with(scenario, field, plain(value)) for value in ascending]
        alive = list(range(len(ascending)))
        seeds = FIRST_SEEDS
        while True:
            self._outcomes(f"{field}, {len(alive)} candidates", [scenarios[number] for number in alive], seeds)
            scored = [self._scored(candidate) for candidate in scenarios]
            best = max(alive, key=lambda number: fmean(scored[number][:seeds]))
            alive = [number for number in alive if not self._is_worse(scored[best], scored[number])]
            if seeds >= self._seeds or len(alive) == 1:
                break
            seeds = min(self._seeds, 2 * seeds)
        allowed = self._negligible(scored[best])
        good = [n for n in alive if n == best or -_behind(scored[best], scored[n]).mean <= allowed]
        given = _field_of(self._scenario, field)
        chosen = good[0] if prefers_small else next((n for n in good if ascending[n] == given), best)
        points = tuple(
            CandidatePoint(
                value=plain(value),
                seeds=len(scored[number]),
                useful=paired.estimate([outcome.useful for outcome in self._known[_key(scenarios[number])]]),
                score=paired.estimate(scored[number]),
                behind_best=None if number == best else _behind(scored[best], scored[number]),
                is_as_good=number in alive,
                failed=sum(outcome.failed_at_s is not None for outcome in self._known[_key(scenarios[number])]),
            )
            for number, value in enumerate(ascending)
        )
        return SearchedField(
            field=field,
            given=plain(given),
            chosen=plain(ascending[chosen]),
            best=plain(ascending[best]),
            start=why,
            points=points,
        )

    def _is_worse(self, best: Sequence[float], other: Sequence[float]) -> bool:
        """Whether a candidate loses more than next to nothing, beyond doubt."""
        behind = _behind(best, other)
        if behind.mean == -math.inf:  # none of its time was useful with some seed
            return True
        return behind.high is not None and -behind.high > self._negligible(best)

    def _negligible(self, best: Sequence[float]) -> float:
        return NEGLIGIBLE if self._goal is Goal.GOODPUT else NEGLIGIBLE * abs(fmean(best))

    def _scored(self, scenario: FleetScenario) -> list[float]:
        return [self._score(outcome) for outcome in self._known[_key(scenario)]]

    def _outcomes(self, what: str, scenarios: Sequence[FleetScenario], seeds: int) -> list[list[RunOutcome]]:
        """The outcomes with the first seeds. What ran before is known."""
        have = {_key(scenario): len(self._known.get(_key(scenario), ())) for scenario in scenarios}
        for count in sorted(set(have.values())):
            behind = [scenario for scenario in scenarios if have[_key(scenario)] == count < seeds]
            if behind:
                missing = range(self._first_seed + count, self._first_seed + seeds)
                for scenario, new in zip(behind, self._run(what, behind, missing), strict=True):
                    self._known.setdefault(_key(scenario), []).extend(new)
        return [self._known[_key(scenario)][:seeds] for scenario in scenarios]

    def _closed_form(self, pilot: Sequence[RunOutcome]) -> ClosedForm:
        """Young's and Daly's interval for what the pilot met."""
        length_s = self._scenario.length_s
        interruptions = sum(outcome.interruptions for outcome in pilot)
        down_s = sum(outcome.down * length_s for outcome in pilot)
        running_s = len(pilot) * length_s - down_s
        if not interruptions or running_s <= 0.0:
            return ClosedForm(None, None, None, None)
        mtti_s, save_s = running_s / interruptions, self._scenario.checkpoint.save_s
        return ClosedForm(
            mtti_s=mtti_s,
            repair_s=down_s / interruptions,
            young_s=young_interval_s(save_s, mtti_s),
            daly_s=daly_interval_s(save_s, mtti_s),
        )


def _broken_at_once(scenario: FleetScenario) -> tuple[float, int]:
    """How many hosts are broken at once on average if they are repaired independently (M/G/infinity), and how many more
    than one host the widest fault hits."""
    cluster = scenario.cluster
    mean, burst = 0.0, 0
    for cause in scenario.causes:
        if cause.effect not in (Effect.GPU, Effect.HOST, Effect.PLANNED):
            continue
        hosts = cluster.hosts_per_rack if cause.reach is FaultReach.RACK else 1
        away_s = cluster.repair_s if cause.effect is Effect.GPU else cluster.reboot_s
        mean += scenario.rate_per_s(cause) * hosts * away_s
        burst = max(burst, hosts - 1)
    return mean, burst


def poisson_quantile(mean: float, share: float) -> int:
    """The smallest count that a Poisson variable does not exceed with this probability."""
    if mean <= 0.0:
        return 0
    total, count = 0.0, 0
    while True:
        total += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        if total >= share or count > 10.0 * mean + 100.0:
            return count
        count += 1


def _whole_steps(seconds: float, step_s: float, least: int = 1) -> float:
    """A save interval in whole steps, in seconds: the number that a setting gives, so that it can be compared."""
    return float(plain(max(least, 1, round(seconds / step_s)) * step_s))


def _with(scenario: FleetScenario, field: str, value: str) -> FleetScenario:
    section, _, name = field.partition(".")
    content = scenario.model_dump()
    content[section][name] = float(value)
    return FleetScenario.model_validate(content)


def _field_of(scenario: FleetScenario, field: str) -> float:
    section, _, name = field.partition(".")
    return float(getattr(getattr(scenario, section), name))


def _key(scenario: FleetScenario) -> str:
    return scenario.model_dump_json()


def _behind(best: Sequence[float], other: Sequence[float]) -> paired.Estimate:
    """How far a candidate is behind the best, on the seeds that both ran with. Negative: it is worse."""
    shared = min(len(best), len(other))
    return paired.difference(best[:shared], other[:shared])
