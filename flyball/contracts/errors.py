"""The exception tree. Every error that a user can meet names its cause and the next step.

Exit codes of the command line (docs/reference/cli.md): 0 done, 1 the job failed or a fault's recovery failed, 2 wrong
usage, else the `exit_code` of the exception's class.
"""

from __future__ import annotations


class FlyballError(Exception):
    """Base of all errors that Flyball raises on purpose.

    `hint` is the next step for the reader. `code` is stable and machine-readable. `status` is the HTTP status that APIs
    report.
    """

    code = "error"
    exit_code = 1
    status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} Next step: {self.hint}" if self.hint else self.message


class UsageError(FlyballError):
    """The command, flag or argument makes no sense."""

    code = "usage"
    exit_code = 2
    status = 400


class ConfigurationError(FlyballError):
    """A setting, file or environment variable is missing or contradicts another."""

    code = "configuration"
    exit_code = 3
    status = 400


class PortInUse(ConfigurationError):
    """The listen address is taken."""

    code = "port_in_use"
    exit_code = 4


class StateVersionMismatch(FlyballError):
    """A state folder, database or segment was written by another version."""

    code = "state_version"
    exit_code = 5
    status = 409


class StorageFull(FlyballError):
    """A disk has no room for data that must be kept."""

    code = "storage_full"
    exit_code = 6
    status = 507


class MemoryTooSmall(FlyballError):
    """Memory or /dev/shm cannot hold the slots; the message contains the memory plan."""

    code = "memory_too_small"
    exit_code = 7
    status = 507


class NotFound(FlyballError):
    """No job, host, incident or decision has that name."""

    code = "not_found"
    exit_code = 8
    status = 404


class Unauthorized(FlyballError):
    """The token is missing or wrong."""

    code = "unauthorized"
    exit_code = 9
    status = 401


class Forbidden(FlyballError):
    """The token is valid but does not permit this."""

    code = "forbidden"
    exit_code = 17
    status = 403


class Unreachable(FlyballError):
    """A service did not reply within its deadline."""

    code = "unreachable"
    exit_code = 10
    status = 503


class InvalidMessage(FlyballError):
    """A message is malformed, too large or of another wire version. It changed nothing."""

    code = "invalid_message"
    exit_code = 11
    status = 400


class TooBusy(FlyballError):
    """A bounded queue is full; retry after `retry_after_s`."""

    code = "too_busy"
    exit_code = 12
    status = 429

    def __init__(self, message: str, *, retry_after_s: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class StaleCommand(FlyballError):
    """A command's (epoch, generation) is older than one already obeyed."""

    code = "stale_command"
    exit_code = 13
    status = 409


class StaleEpoch(FlyballError):
    """This controller no longer holds the lease. Nothing of the transaction was stored."""

    code = "stale_epoch"
    exit_code = 14
    status = 409


class IllegalTransition(FlyballError):
    """A state machine's table does not have the requested transition."""

    code = "illegal_transition"
    exit_code = 15
    status = 409


class Conflict(FlyballError):
    """The request contradicts existing state: for example, a second job of the same name with another specification."""

    code = "conflict"
    exit_code = 16
    status = 409


class ReportReplayed(FlyballError):
    """This very report was received before. It changed nothing."""

    code = "report_replayed"
    status = 409


class ReportOutOfOrder(FlyballError):
    """A newer report of this daemon was received before. This one changed nothing."""

    code = "report_out_of_order"
    status = 409


class DaemonSuperseded(FlyballError):
    """Another daemon represents this host. This one's message changed nothing, and it gets no commands."""

    code = "daemon_superseded"
    status = 409


class WrongClock(FlyballError):
    """A report's time is too far from the supervisor's, given in `server_time`. It changed nothing."""

    code = "wrong_clock"
    status = 422

    def __init__(self, message: str, *, server_time: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.server_time = server_time


class CheckpointError(FlyballError):
    """Base of the checkpoint engine's errors."""

    code = "checkpoint"
    exit_code = 20


class CorruptShard(CheckpointError):
    """Bytes do not match their checksum, or a manifest or header does not parse. The copy does not count."""

    code = "corrupt_shard"
    exit_code = 21


class NewerFormat(CorruptShard):
    """A newer release wrote it, in a format that this one cannot read; the message names both. Nothing is wrong with
    the bytes."""

    code = "newer_format"


class UnsupportedState(CheckpointError):
    """The state has a leaf that cannot be saved without pickling; the message names its path."""

    code = "unsupported_state"
    exit_code = 22
    status = 400


class RestoreFailed(CheckpointError):
    """No source has the named step. A worker that meets this exits with this code, and the controller grants a
    generation with an older recovery point."""

    code = "restore_failed"
    exit_code = 23


class StateMismatch(CheckpointError):
    """The saved state does not fit the model, optimizer or container; the message names the path.

    The error is in the job, not in the copy: an older recovery point would not help.
    """

    code = "state_mismatch"
    exit_code = 24
    status = 400


class NotAsWritten(CheckpointError):
    """A store took the bytes, and holds others. The write has failed."""

    code = "not_as_written"


class NothingVerifies(CheckpointError):
    """There are checkpoints to resume from, and none of them has good bytes of every rank. Nothing was changed."""

    code = "nothing_verifies"
    exit_code = 25
    status = 409


class NotStored(CheckpointError):
    """The job succeeded, and its newest step could not be written to its store. It is kept in memory."""

    code = "not_stored"
    exit_code = 26


class JobFailed(FlyballError):
    """The job ended without success."""

    code = "job_failed"
    exit_code = 1
