"""What a script sets before it imports torch is found before the script runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from host_daemon.spawning.early_settings import changed, found_in


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch", "OMP_NUM_THREADS"),
        ("from os import environ as e, environ\nenviron.setdefault('PYTORCH_JIT', '0')", "PYTORCH_JIT"),
        ("import os\nos.environ.update({'A': '1', 'CUDA_VISIBLE_DEVICES': '0'})", "CUDA_VISIBLE_DEVICES"),
        ("import os\nos.environ.update(MKL_NUM_THREADS='1')", "MKL_NUM_THREADS"),
        ("import os\nos.environ |= {'TORCH_LOGS': '+dynamo'}", "TORCH_LOGS"),
        ("import os\nos.environb[b'KMP_AFFINITY'] = b'none'", "KMP_AFFINITY"),
        ("import os\nos.putenv('OMP_PROC_BIND', 'true')", "OMP_PROC_BIND"),
        ("import os\ndel os.environ['OMP_NUM_THREADS']", "OMP_NUM_THREADS"),
        ("import os\nif True:\n  try:\n    os.environ['OMP_A'] = '1'\n  finally:\n    pass\nimport torch", "OMP_A"),
        ("import os\ndef main():\n  os.environ['OMP_A'] = '1'\n  import torch\nmain()", "OMP_A"),
        ("import os, cfg\nfor k in cfg:\n  os.environ[k] = cfg[k]\nimport torch", "a variable"),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", "a variable"),
        ("import os, beside\nimport torch", "OMP_BESIDE"),
        ("from package import settings, more\nimport torch", "OMP_PACKAGE"),
        ("import os\nimport torch\nos.environ['OMP_NUM_THREADS'] = '2'", ""),
        ("import os\nimport with_torch\nos.environ['OMP_NUM_THREADS'] = '2'", ""),
        ("import os\nos.environ['WANDB_MODE'] = 'off'\nos.environ['MASTER_PORT'] = '1'\nimport torch", ""),
        ("import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\nimport torch", ""),
        ("import os\nprint(os.environ['OMP_NUM_THREADS'])", ""),
        ("this is no python", ""),
        ("import train\nimport os", ""),
    ],
)
def test_settings_are_found_where_they_come_before_torch(tmp_path: Path, script: str, name: str) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "beside.py").write_text("import os\nos.environ['OMP_BESIDE'] = '1'")
    (tmp_path / "with_torch.py").write_text("import torch.nn as nn")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import os\nos.environ['OMP_PACKAGE'] = '1'")
    assert found_in(tmp_path / "train.py") == name


def test_what_has_changed_is_named_if_it_is_read_early() -> None:
    before = {"OMP_NUM_THREADS": "1", "HOME": "/", "MKL_A": "1"}
    assert changed(before, {"OMP_NUM_THREADS": "2", "HOME": "/x", "CUDA_B": "1"}) == [
        *("CUDA_B", "MKL_A", "OMP_NUM_THREADS"),
    ]


def test_a_file_that_is_none_is_left_to_python(tmp_path: Path) -> None:
    assert found_in(tmp_path) == found_in(tmp_path / "missing.py") == ""
