"""The planning commands refuse what cannot be, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_commands import run_here


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("compare small", "A and B are the same"),
        ("compare small --set-b days=3", "A takes 7 days and B 3"),
        ("compare small --set-b checkpoint.evry_s=3", "did you mean checkpoint.every_s?"),
        ("compare smal --set-b days=3", "did you mean small?"),
        ("sweep small", "something to vary"),
        ("sweep small --vary cluster.spares=1,x", "cluster.spares: must be a whole number, not x"),
        ("sweep small --vary cluster.spares=1,2 --spare-price 2", "--gpu-hour-price"),
        ("sweep small --vary cluster.spares=1,2 --report nowhere/x.html", "there is no folder nowhere"),
        ("run small --calibrate missing.json", "missing.json"),
    ],
)
def test_what_cannot_be_is_refused_first(line: str, told: str, tmp_path: Path) -> None:
    done = run_here("simulate", *line.split(), environment={"HOME": str(tmp_path)})
    assert done.returncode not in (0, 1)
    assert told in done.stderr
    assert "seed" not in done.stderr
