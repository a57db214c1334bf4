from __future__ import annotations

import re
from pathlib import Path

from flyball.contracts import fault_points

ROOT = Path(__file__).parents[3]
PACKAGES = ("flyball", "ckpt_engine", "host_daemon", "services")
REACHED = re.compile(r"\breach\(([^)]*)\)")


def names(argument: str) -> list[str]:
    """The names that `reach(argument)` can be called with."""
    if argument.startswith("f"):
        return [argument.removeprefix("f").strip('"').replace("{self.tier}", tier) for tier in ("disk", "persistent")]
    return [argument.strip('"')]


def test_every_fault_point_in_the_code_is_listed_and_every_listed_one_is_in_the_code() -> None:
    here = ROOT / "flyball" / "contracts" / "fault_points.py"
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path != here]
    reached = {argument for path in files for argument in REACHED.findall(path.read_text())}
    assert {name for argument in reached for name in names(argument)} == set(fault_points.KNOWN)
    assert len(set(fault_points.KNOWN)) == len(fault_points.KNOWN)
