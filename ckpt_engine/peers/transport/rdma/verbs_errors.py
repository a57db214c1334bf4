"""What a call of pyverbs that fails means: the device is gone, or it refused this one call."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ckpt_engine.peers.transport.rdma.completion_errors import DeviceLost, DeviceRefused, QueuePairError
from ckpt_engine.peers.transport.rdma.verbs import (
    RdmaUnavailable,
    Refusal,
    load_pyverbs,
    memlock_limit,
    memlock_refusal,
)

_GONE: Final = (errno.ENODEV, errno.EIO)  # EIO: what ib_uverbs answers for a device that was removed


@contextmanager
def verbs_errors() -> Iterator[None]:
    """What a call of pyverbs raises in the body becomes DeviceLost if the device is gone, else DeviceRefused."""
    try:
        yield
    except load_pyverbs().errors.PyverbsError as error:
        reason, number = " ".join(str(error).split()).rstrip("."), getattr(error, "error_code", 0)
        if number in _GONE:
            raise DeviceLost(f"{DeviceLost.reason}: {reason}", hint=DeviceLost.next_step) from error
        raise DeviceRefused(
            f"{DeviceRefused.reason}: {reason}", hint=DeviceRefused.next_step, error_number=number
        ) from error


def lacks_memlock(error: QueuePairError) -> bool:
    """Whether it may be because this process can lock too little memory: ENOMEM, or EPERM if it may lock none."""
    return isinstance(error, DeviceRefused) and error.error_number in (errno.ENOMEM, errno.EPERM)


def unavailable(device: str, error: QueuePairError, *, needed_bytes: int) -> RdmaUnavailable:
    """Why there is no RDMA with this device after `error`, while `needed_bytes` were to be locked."""
    if isinstance(error, DeviceLost):
        return RdmaUnavailable(
            Refusal.NO_DEVICE,
            f"The RDMA device {device} does not work: {error.message}.",
            hint="`flyball doctor` tries it out; dmesg has the driver's reason",
        )
    if lacks_memlock(error) and memlock_limit() is not None:
        return memlock_refusal(needed_bytes)
    return RdmaUnavailable(
        Refusal.NO_ACCESS,
        f"The RDMA device {device} cannot be used: {error.message}.",
        hint="`flyball doctor` tries it out; dmesg has the driver's reason",
    )
