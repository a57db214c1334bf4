"""Run a sample of the mutants of the pure core and estimate the mutation score; called by `make mutants SAMPLE=300`.

    python deploy/mutation_score.py --sample 300
    python deploy/mutation_score.py --sample 40 'services.rules.*'

mutmut makes the mutants (`[tool.mutmut]` in pyproject.toml). Every module contributes in proportion to its mutants, and
at least one. The seed is fixed, so that unchanged modules give the same sample. Prints killed and total by module, the
score with its 95 % interval (Wilson), and the survivors; read one with `mutmut show NAME`.

Exit codes: 0, 2 if there are no mutants to sample, or the exit code of mutmut.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTMUT = [str(Path(sys.executable).parent / "mutmut"), "run"]
# Makes the mutants and runs none of them: mutmut has no command for that.
GENERATE = """
from mutmut import __main__ as mutmut
mutmut.set_mutant_under_test("mutant_generation")
mutmut.makedirs("mutants", exist_ok=True)
mutmut.copy_src_dir()
mutmut.copy_also_copy_files()
mutmut.setup_source_paths()
mutmut.create_mutants({children})
"""
SEED = 14
KILLED = {1, 3, 24, -24, 36, 152, 255}  # exit codes: a test failed, pytest failed, or the time was up
NORMAL_95 = 1.96


def main() -> int:
    options = _options()
    subprocess.run(
        [sys.executable, "-c", GENERATE.format(children=options.max_children)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    mutants = [name for name in sorted(_exit_codes()) if any(fnmatch(name, only) for only in options.only or ["*"])]
    chosen = sample(mutants, options.sample, random.Random(options.seed))
    if not chosen:
        print(f"No mutant matches {options.only}.", file=sys.stderr)
        return 2
    print(f"{len(chosen)} of {len(mutants)} mutants, seed {options.seed}", flush=True)
    ran = subprocess.run([*MUTMUT, "--max-children", str(options.max_children), *chosen], cwd=ROOT, check=False)
    _print_score({name: code for name, code in _exit_codes().items() if name in set(chosen)})
    return ran.returncode


def sample(mutants: list[str], count: int, chance: random.Random) -> list[str]:
    """Draw about `count` mutants: from each module in proportion to its size, and at least one."""
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in mutants:
        by_module[module_of(name)].append(name)
    share = min(1.0, count / max(1, len(mutants)))
    return [
        name for names in by_module.values() for name in sorted(chance.sample(names, max(1, round(share * len(names)))))
    ]


def module_of(mutant: str) -> str:
    """`services.rules.unreadable.x_first__mutmut_3` -> `services.rules.unreadable`."""
    return mutant.rpartition(".")[0]


def wilson(killed: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a proportion, as fractions."""
    rate, spread = killed / total, NORMAL_95**2 / total
    middle = rate + spread / 2
    half = NORMAL_95 * math.sqrt(rate * (1 - rate) / total + spread / (4 * total))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


def _exit_codes() -> dict[str, int | None]:
    """The exit code of the tests by mutant; None for a mutant that has not run."""
    codes: dict[str, int | None] = {}
    for path in (ROOT / "mutants").rglob("*.py.meta"):
        if (ROOT / path.relative_to(ROOT / "mutants")).with_suffix("").exists():  # else: of a file that is gone
            codes |= json.loads(path.read_text("utf-8"))["exit_code_by_key"]
    return codes


def _print_score(codes: dict[str, int | None]) -> None:
    ran = {name: code for name, code in codes.items() if code is not None}
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, code in ran.items():
        totals[module_of(name)][0] += code in KILLED
        totals[module_of(name)][1] += 1
    print()
    for module, (killed, total) in sorted(totals.items()):
        print(f"{killed:5} of {total:4}  {module}")
    killed, total = sum(killed for killed, _ in totals.values()), len(ran)
    low, high = wilson(killed, total) if total else (0.0, 1.0)
    print(f"{killed:5} of {total:4}  killed: {killed / max(1, total):.1%} (95 % interval {low:.1%} to {high:.1%})")
    if total < len(codes):
        print(f"{len(codes) - total} did not run")
    print("Survivors:")
    for name, code in sorted(ran.items()):
        if code not in KILLED:
            print(f"  {name}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="PATTERN", help="only mutants whose names match")
    parser.add_argument("--sample", type=int, required=True, metavar="N", help="about how many mutants")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--max-children", type=int, default=2, metavar="N", help="tests at the same time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
