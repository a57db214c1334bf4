"""What a host's report shows of workers that nobody wants any more."""

from __future__ import annotations

import pytest

from services.record.host_views import CachedHost, host_views

NEWEST = {"job": (4, False), "done": (2, True)}


@pytest.mark.parametrize(
    ("placed", "workers", "stale"),
    [
        ("job", {"job": 4}, {}),
        ("job", {}, {}),
        ("job", {"job": 3}, {"job": 3}),
        ("", {"job": 3}, {"job": 3}),
        ("", {"job": 4}, {"job": 4}),  # its number was granted twice, and this host was not given it last
        ("", {"job": 5}, {}),  # of a generation that the database does not know yet
        ("", {"done": 2}, {"done": 2}),
        ("job", {"job": 4, "done": 2}, {"done": 2}),
        ("job", {"elsewhere": 1}, {}),
    ],
)
def test_workers_are_stale_that_the_newest_generation_has_no_place_for(
    placed: str, workers: dict[str, int], stale: dict[str, int]
) -> None:
    (view,) = host_views([CachedHost("a", workers=workers)], {"a": placed} if placed else {}, NEWEST)
    assert view.stale_jobs == stale
