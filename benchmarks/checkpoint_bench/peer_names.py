"""The engines that are measured beside Flyball's; `peer_*.py` have their adapters."""

from __future__ import annotations

PEERS = (
    "torch.save",
    "safetensors",
    "dcp.save",
    "dcp.async_save-thread",
    "dcp.async_save-thread-reused",  # a stager that keeps its buffers from save to save
    "dcp.async_save-thread-pinned",
    "dcp.async_save-process",
    "dcp.async_save-process-shared",  # a reused stager in shared memory
    "dcp.async_save-process-pinned",
    "dlrover",
    "nvidia-local",
    "nvidia-async",
    "torchsnapshot",
)
