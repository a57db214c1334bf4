"""The planning commands refuse what cannot be, before anything runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from support.commands.here import run_here


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
        ("optimize small --best cost --gpu-hour-price 0", "--gpu-hour-price above 0"),
        ("sweep small --vary cluster.spares=1,2 --out nowhere/x.html", "there is no folder nowhere"),
        ("run small --calibrate missing.json", "missing.json"),
    ],
)
def test_what_cannot_be_is_refused_first(line: str, told: str, tmp_path: Path) -> None:
    done = run_here("simulate", *line.split(), environment={"HOME": str(tmp_path)})
    assert done.returncode not in (0, 1)
    assert told in done.stderr
    assert "seed" not in done.stderr


SHORT = ("--set", "days=0.05", "--jobs", "1", "-o", "json")


def test_a_comparison_for_programs_and_for_people(tmp_path: Path) -> None:
    demo = tmp_path / "demo.json"
    parts = {"stop": {"median_s": 0.5, "count": 4}, "restart": {"median_s": 2.0, "count": 4}}
    demo.write_text(json.dumps({"faults": [], "losses_compared": 1, "repair": parts}))
    page = tmp_path / "page.html"
    line = ("compare", "small", "--set-b", "checkpoint.every_s=600", "--seeds", "2", *SHORT)
    more = ("--out", str(page), "--calibrate", str(demo), "--gpu-hour-price", "2")
    done = run_here("simulate", *line, *more, environment={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["seeds"]) == ("flyball.simulation.comparison.v1", [1, 2])
    assert found["a"]["settings"] == ["times.stop_s=0.5", "times.start_s=2", "days=0.05"]
    assert found["b"]["settings"] == [*found["a"]["settings"], "checkpoint.every_s=600"]
    assert "cost of a useful GPU hour" in [measure["name"] for measure in found["measures"]]
    assert found["answer"] in page.read_text()
    assert "times.start_s = 2.000s, median restart of 4 repairs" in done.stderr
    assert "seeds 1 to 2" in done.stderr


def test_a_sweep_writes_a_row_per_run(tmp_path: Path) -> None:
    table = tmp_path / "sweep.csv"
    line = ("sweep", "small", "--vary", "checkpoint.every_s=60,600", "--seeds", "2", *SHORT, "--csv", str(table))
    done = run_here("simulate", *line, environment={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert [point["values"] for point in json.loads(done.stdout)["points"]] == [["60"], ["600"]]
    rows = list(csv.DictReader(table.open()))
    assert [(row["checkpoint.every_s"], row["seed"]) for row in rows] == [
        ("60", "1"),
        ("60", "2"),
        ("600", "1"),
        ("600", "2"),
    ]
