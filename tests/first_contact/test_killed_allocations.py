"""A batch system that ends an allocation kills every process: nobody is left to record an end. What then comes on the
same machines is a new allocation of the same job, or of another one. `FLYBALL_OFTEN=20` has more of these."""

from __future__ import annotations

import re
from pathlib import Path

from support.jobs.allocations import OFTEN, Allocation


def test_the_same_command_goes_on_and_no_job_comes_back_in_another_ones_allocation(place: Path) -> None:
    first = Allocation(place, "first")
    first.train_on()
    first.kill()
    stood = [max(first.steps(rank)) for rank in (0, 1)]
    for number in range(OFTEN):
        other = Allocation(place, f"other-{number}")
        other.train_on()
        other.kill()
        assert "first" not in re.sub(r"/\S+", "", other.text), "it is not even mentioned"
    assert [max(first.steps(rank)) for rank in (0, 1)] == stood, "nothing of it ran in their allocations"

    again = Allocation(place, "first")
    again.train_on()
    assert again.text.count("joins http://") == 2, "each node has a daemon, whatever the database says of the last one"
    for rank in (0, 1):
        steps = again.steps(rank)
        assert steps[: stood[rank] + 1] == list(range(stood[rank] + 1))
        assert steps[stood[rank] + 1] >= stood[rank] - 1, "it went on from memory, without a save every step at most"
    again.kill()
