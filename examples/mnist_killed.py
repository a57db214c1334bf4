"""Kill examples/mnist.py again and again while it trains, and compare every loss with a run that nobody killed.

    python examples/mnist_killed.py --kills 5

Prints what happened, and exits with 0 only if every loss of every step is the same to the last bit.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("mnist.py")
DEADLINE_S = 300.0


def losses_in(path: Path) -> list[tuple[int, str]]:
    """(step, loss) in the order in which they were computed, repeated steps included. A line may be cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [(int(step), loss) for step, loss in (line.split() for line in lines if line.endswith("\n"))]


def start(folder: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--steps", str(options.steps), "--data", str(options.data)]
    command += ["--checkpoint", str(folder / "mnist.pt"), "--losses", str(folder / "losses")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run(folder: Path, options: argparse.Namespace, kill_at: list[int]) -> list[tuple[int, str]]:
    """Run to the end, killed when it has reached each of these steps."""
    losses = folder / "losses"
    for step in [*kill_at, None]:
        process = start(folder, options)
        deadline_s = time.monotonic() + DEADLINE_S
        while step is not None and process.poll() is None and time.monotonic() < deadline_s:
            if (reached := max([-1, *(number for number, _ in losses_in(losses))])) >= step:
                process.send_signal(signal.SIGKILL)
                print(f"killed at step {reached}", flush=True)
                break
            time.sleep(0.001)
        output, _ = process.communicate(timeout=DEADLINE_S)
        print("".join(f"  {line}\n" for line in output.splitlines()), end="", flush=True)
        if step is None and process.returncode:
            sys.exit(process.returncode)
    return losses_in(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill examples/mnist.py, and compare its losses.")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    kill_at = sorted(chance.sample(range(options.steps // 10, options.steps * 9 // 10), options.kills))
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, name) for name in ("undisturbed", "killed")]
        for place in places:
            place.mkdir()
        print("a run that nobody kills:", flush=True)
        truth = dict(run(places[0], options, []))
        print(f"the same, killed {options.kills} times:", flush=True)
        found = run(places[1], options, kill_at)
    different = [step for step, loss in found if truth[step] != loss]
    repeated = len(found) - len({step for step, _ in found})
    print(f"{len(found)} losses compared, {repeated} of them of repeated steps: {len(different)} differ")
    sys.exit(bool(different) or {step for step, _ in found} != set(range(options.steps)))


if __name__ == "__main__":
    main()
