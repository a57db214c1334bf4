"""Make the checkpoints of this release that later releases must read:

    PYTHONPATH=.:tests python tests/kept_checkpoints/make.py tests/kept_checkpoints/0.1-format2

Once for a format, never again: what is kept is not made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

from support.jobs.saved_steps import exact_tensors, more_kinds, truth, write_shard, write_step
from support.stores.kept_json import in_json

from ckpt_engine.trainer.path_saves.path_saver import process_saver


def main() -> None:
    folder = Path(sys.argv[1])
    write_step(folder / "g1" / "step3", (2,))
    (folder / "g1" / "step5").mkdir()
    write_shard(folder / "g1" / "step5", 0, 1, more_kinds(), step=5)
    with tempfile.TemporaryDirectory() as shm:
        os.environ["FLYBALL_SHM_DIR"] = shm
        assert process_saver().save(truth(), folder / "ckpt.pt").wait()
        assert process_saver().save(more_kinds() | exact_tensors(), folder / "kinds.pt").wait()
        process_saver().finish_at_exit()
    (folder / "truth.json").write_text(json.dumps(in_json(truth())) + "\n")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    main()
