"""A report in Prometheus' text exposition format, for a textfile collector or any scraper of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from goodput.calculator import GoodputReport


def exposition(reports: Iterable[GoodputReport]) -> str:
    """Gauges with the label `training_job`. Measures without a value are left out. Times are seconds, ratios are
    fractions of 1."""
    registry = CollectorRegistry()
    registry.register(_Reports(list(reports)))
    return generate_latest(registry).decode()


_JOB = "training_job"  # `job` is the scrape's own label
_Measure = Callable[[GoodputReport], float | None]
_MEASURES: Mapping[str, tuple[str, _Measure]] = {
    "ratio": ("Useful time over elapsed time.", lambda r: r.goodput),
    "ettr_ratio": ("Effective training time ratio.", lambda r: r.ettr),
    "ettr_window_ratio": ("ETTR over the newest window.", lambda r: r.ettr_window.last if r.ettr_window else None),
    "elapsed_seconds": ("Elapsed time of the job.", lambda r: r.elapsed_s),
    "running": ("1 while the job runs, 0 when it has ended.", lambda r: float(not r.outcome)),
    "interruptions": ("Incidents that a new generation or the end of the job followed.", lambda r: r.interruptions),
    "incidents": ("Incidents.", lambda r: len(r.incidents)),
    "mttr_seconds": ("Mean time from a fault to the first step after it.", lambda r: r.mttr_s),
    "mttf_seconds": ("Mean running time per interruption.", lambda r: r.mttf_s),
    "mtbi_seconds": ("Mean elapsed time per interruption.", lambda r: r.mtbi_s),
    "mttd_seconds": ("Mean time from a fault to its incident.", lambda r: r.mttd_s),
    "step_seconds": ("The median step.", lambda r: r.step_s),
    "newest_step": ("The newest step that all ranks completed; -1 before the first.", lambda r: r.steps.newest),
    "steps_kept": ("Steps that were kept.", lambda r: r.steps.kept),
    "steps_recomputed": ("Steps that were recomputed.", lambda r: r.steps.recomputed),
    "gpus": ("GPUs of the job.", lambda r: r.gpus),
    "gpu_seconds": (
        "GPUs times elapsed time.",
        lambda r: None if r.gpu_hours is None else 3600.0 * r.gpu_hours,
    ),
    "cost": ("Cost of the elapsed time, in the currency of the price given.", lambda r: r.cost),
    "mfu_ratio": ("Model FLOPs utilisation while the job trained.", lambda r: r.mfu),
    "recommended_save_steps": (
        "Steps between saves at the optimum for the observed failure rate.",
        lambda r: r.recommendation.save_every_steps if r.recommendation else None,
    ),
}
_TABLES: Mapping[str, tuple[str, str, Callable[[GoodputReport], Mapping[str, float]]]] = {
    "category_seconds": (
        "Elapsed time by category; sums to the elapsed time.",
        "category",
        lambda r: r.seconds_by_category,
    ),
    "badput_seconds": ("Time that was not useful, by cause.", "cause", lambda r: r.badput_s),
    "badput_host_seconds": (
        "Time that was not useful, by the host that caused it.",
        "host",
        lambda r: r.badput_by_host,
    ),
    "badput_failure_class_seconds": (
        "Time that was not useful, by failure class.",
        "failure_class",
        lambda r: r.badput_by_failure_class,
    ),
}


class _Reports(Collector):
    def __init__(self, reports: list[GoodputReport]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (help_text, value) in _MEASURES.items():
            family = GaugeMetricFamily(f"flyball_goodput_{name}", help_text, labels=[_JOB])
            for report in self._reports:
                found = value(report)
                if found is not None:
                    family.add_metric([report.job], float(found))
            yield family
        for name, (help_text, label, values) in _TABLES.items():
            family = GaugeMetricFamily(f"flyball_goodput_{name}", help_text, labels=[_JOB, label])
            for report in self._reports:
                for key, seconds in values(report).items():
                    family.add_metric([report.job, key], seconds)
            yield family
