"""torch.distributed.checkpoint (DCP) on Flyball's format: see docs/how-to/dcp.md."""

from ckpt_engine.dcp.planner import FlyballSavePlanner
from ckpt_engine.dcp.reader import FlyballReader
from ckpt_engine.dcp.stager import FlyballStager
from ckpt_engine.dcp.writer import FlyballWriter

__all__ = ["FlyballReader", "FlyballSavePlanner", "FlyballStager", "FlyballWriter"]
