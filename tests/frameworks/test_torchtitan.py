"""torchtitan's checkpoint manager with every step in memory: FSDP2 on two ranks, killed, and not killed."""

from __future__ import annotations

from support.commands.framework_runs import EXAMPLES, Place, losses


def test_killed_fsdp2_training_has_the_loss_of_one_that_was_not(place: Place) -> None:
    script = EXAMPLES / "torchtitan_parts.py"
    whole = place.uninterrupted(script, "whole", ranks=2)
    killed = place.killed(script, "killed", kills={100: 1}, ranks=2)
    assert len(losses(whole)) == 2
    assert losses(killed.output) == losses(whole)
    for folder in ("whole", "killed"):  # torchtitan's own checkpoints are written as before
        assert (place.folder / folder / "checkpoint" / "step-600" / ".metadata").exists()
