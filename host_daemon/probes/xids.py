"""NVIDIA's Xid numbers: what each means, and how serious it is here. Pure.

The meanings are NVIDIA's (docs.nvidia.com/deploy/xid-errors). Critical is what needs a reset or a repair before the GPU
can be used again; a warning, what needs one soon; the rest follows from the program that ran, or is harmless.
"""

from __future__ import annotations

from typing import Final

from flyball.contracts.reports.conditions import Severity

_INFO, _WARNING, _CRITICAL = Severity.INFO, Severity.WARNING, Severity.CRITICAL

XIDS: Final[dict[int, tuple[str, Severity]]] = {
    13: ("graphics engine exception, mostly of the program", _INFO),
    31: ("GPU memory page fault, mostly of the program", _INFO),
    32: ("invalid or corrupted push buffer stream", _INFO),
    38: ("driver firmware error", _WARNING),
    43: ("the GPU stopped processing a program", _INFO),
    45: ("preemptive cleanup after earlier errors", _INFO),
    46: ("the GPU stopped processing", _CRITICAL),
    48: ("double-bit ECC error", _CRITICAL),
    54: ("auxiliary power is not connected", _CRITICAL),
    56: ("display engine error", _INFO),
    58: ("unstable video memory interface", _WARNING),
    61: ("internal micro-controller breakpoint or warning", _WARNING),
    62: ("internal micro-controller halt", _CRITICAL),
    63: ("a page or row of GPU memory is to be retired", _WARNING),
    64: ("a page or row of GPU memory could not be retired", _CRITICAL),
    68: ("video decoder exception", _INFO),
    69: ("graphics engine class error", _INFO),
    74: ("NVLink error", _WARNING),
    79: ("the GPU has fallen off the bus", _CRITICAL),
    80: ("corrupted data was sent to the GPU", _WARNING),
    92: ("high rate of single-bit ECC errors", _WARNING),
    94: ("contained ECC error", _WARNING),
    95: ("uncontained ECC error", _CRITICAL),
    109: ("context switch timeout", _WARNING),
    119: ("timeout of a call to the GPU's system processor", _CRITICAL),
    120: ("error of the GPU's system processor", _CRITICAL),
    121: ("error of the link between CPU and GPU, corrected", _WARNING),
    137: ("NVLink access without privilege, mostly of the program", _INFO),
    140: ("unrecovered ECC error", _CRITICAL),
    143: ("GPU initialization failure", _CRITICAL),
    144: ("NVLink SAW error", _WARNING),
    145: ("NVLink RLW error", _WARNING),
    146: ("NVLink TLW error", _WARNING),
    147: ("NVLink TREX error", _WARNING),
    149: ("NVLink NETIR error", _WARNING),
    150: ("NVLink MSE error", _WARNING),
    154: ("the GPU's recovery action changed", _WARNING),
    156: ("a resource of the GPU was retired", _WARNING),
    157: ("a resource of the GPU could not be retired", _CRITICAL),
    158: ("fatal timeout of the GPU", _CRITICAL),
}


def meaning_of(xid: int) -> tuple[str, Severity]:
    """The meaning and severity of an Xid. One that is not in the table is on record only."""
    return XIDS.get(xid, ("not in Flyball's table; see NVIDIA's catalog", _INFO))
