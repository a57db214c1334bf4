"""What each failed work completion means, as a named exception with the next step."""

from __future__ import annotations

from typing import Final

from flyball.contracts.errors import Unreachable

RETRIED: Final = "nothing to do: it is retried while the generation runs"


class QueuePairError(Unreachable):
    """A queue pair broke. It is torn down with its connection, and the next transfer makes another one."""

    code = "rdma_queue_pair"
    reason = "the queue pair failed"
    next_step = RETRIED


class RetryExceeded(QueuePairError):
    """The peer's NIC does not acknowledge."""

    code = "rdma_retry_exceeded"
    reason = "timed out: the peer's NIC acknowledged nothing, however often it was sent"
    next_step = (
        "check that the peer is up and that the network carries RoCE (UDP port 4791) or InfiniBand between the hosts"
    )


class ReceiverNotReady(QueuePairError):
    """The peer had no receive buffer for too long."""

    code = "rdma_receiver_not_ready"
    reason = "the peer's engine took nothing in for too long"
    next_step = "check whether the peer's engine hangs; " + RETRIED


class AccessRefused(QueuePairError):
    """The peer's NIC refused to write to, or read from, its memory."""

    code = "rdma_access_refused"
    reason = "the peer's NIC refused the access to its memory: the key was revoked, or the address is outside the slot"
    next_step = "nothing to do if the peer gave the transfer up (its log says so): it is retried"


class RequestRefused(QueuePairError):
    """The peer's NIC does not understand the request."""

    code = "rdma_request_refused"
    reason = "the peer's NIC refused the request as invalid"
    next_step = "run the same release of Flyball on all hosts; else report it"


class RemoteFailed(QueuePairError):
    """The peer's NIC could not carry the request out."""

    code = "rdma_remote_failed"
    reason = "the peer's NIC could not carry the request out"
    next_step = "look into the peer's kernel log (dmesg) for errors of its NIC; " + RETRIED


class Flushed(QueuePairError):
    """The queue pair had failed before, or was torn down."""

    code = "rdma_flushed"
    reason = "the queue pair ended before this was carried out"


class LocalMemoryRefused(QueuePairError):
    """This host's NIC refused to use our memory."""

    code = "rdma_local_memory"
    reason = "this host's NIC refused to use the slot's memory: its registration has ended"


class MessageTooLong(QueuePairError):
    """A message does not fit into the buffer for it."""

    code = "rdma_message_length"
    reason = "a message was longer than the buffer for it"
    next_step = "run the same release of Flyball on all hosts; else report it"


class WindowNotBound(QueuePairError):
    """A memory window could not be bound."""

    code = "rdma_window"
    reason = "this host's NIC could not make an access key for the slot"
    next_step = "look into the kernel log (dmesg) for errors of the NIC; FLYBALL_CKPT_TRANSPORT=tcp goes without"


class DeviceLost(QueuePairError):
    """The RDMA device failed, or is gone."""

    code = "rdma_device_lost"
    reason = "the RDMA device failed, or is gone"
    next_step = "`flyball doctor` says what is there; with transport = auto, the next connection uses TCP"


class DeviceRefused(QueuePairError):
    """The RDMA device, or its driver, refused a call. It works on for others."""

    code = "rdma_device_refused"
    reason = "this host's RDMA device refused a call"
    next_step = "look into the kernel log (dmesg) for errors of the NIC; " + RETRIED

    def __init__(self, message: str, *, hint: str = "", error_number: int = 0) -> None:
        """`error_number`: see `errno`; 0 if there is none."""
        super().__init__(message, hint=hint)
        self.error_number = error_number


# ibv_wc_status; the numbers are the kernel's interface, and older than any release of rdma-core in use
_BY_STATUS: Final[dict[int, type[QueuePairError]]] = {
    1: MessageTooLong,  # LOC_LEN_ERR
    2: QueuePairError,  # LOC_QP_OP_ERR
    4: LocalMemoryRefused,  # LOC_PROT_ERR
    5: Flushed,  # WR_FLUSH_ERR
    6: WindowNotBound,  # MW_BIND_ERR
    8: LocalMemoryRefused,  # LOC_ACCESS_ERR
    9: RequestRefused,  # REM_INV_REQ_ERR
    10: AccessRefused,  # REM_ACCESS_ERR
    11: RemoteFailed,  # REM_OP_ERR
    12: RetryExceeded,  # RETRY_EXC_ERR
    13: ReceiverNotReady,  # RNR_RETRY_EXC_ERR
    19: DeviceLost,  # FATAL_ERR
    20: RetryExceeded,  # RESP_TIMEOUT_ERR
}


def completion_error(status: int, vendor_code: int = 0) -> QueuePairError:
    """The exception for a work completion that is not a success (0)."""
    kind = _BY_STATUS.get(status, QueuePairError)
    return kind(f"{kind.reason} (work completion status {status}, vendor {vendor_code:#x})", hint=kind.next_step)
