"""Models that are too long for the files of their tests lie beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # tests are no packages: the module beside this one is found by path
pytest.register_assert_rewrite("slots_world")
