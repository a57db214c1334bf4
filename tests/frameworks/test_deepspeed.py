"""DeepSpeed with `use(engine)`: ZeRO 1 to 3, killed, and not killed, to the last bit."""

from __future__ import annotations

import pytest
from support.commands.framework_runs import EXAMPLES, Place, losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_killed_zero_training_has_the_loss_of_one_that_was_not(place: Place, stage: int) -> None:
    script = EXAMPLES / "deepspeed_zero.py"
    whole = place.uninterrupted(script, str(stage), "whole", ranks=2)
    killed = place.killed(script, str(stage), "killed", kills={45: 1}, lost=10, ranks=2)
    assert len(losses(whole)) == 2
    assert losses(killed.output) == losses(whole)
    tags = {path.name for path in (place.folder / "killed").iterdir() if path.is_dir()}
    assert tags == {f"global_step{step}" for step in range(10, 201, 10)}
