"""Types of fields that many replies have, with their units and an example each."""

from __future__ import annotations

from typing import Annotated

import msgspec

WallClock = Annotated[
    float, msgspec.Meta(description="Wall clock, seconds since 1970.", examples=[1_763_635_380.25], ge=0.0)
]
WallClockOrNull = Annotated[
    float | None, msgspec.Meta(description="Wall clock, seconds since 1970; null: not reached.", examples=[None])
]
SecondsOrNull = Annotated[
    float | None, msgspec.Meta(description="A duration in seconds; null: not known.", examples=[0.412])
]
JobName = Annotated[str, msgspec.Meta(description="Name of a job.", examples=["gpt"])]
JobOrEmpty = Annotated[str, msgspec.Meta(description="Name of a job; '': none.", examples=["gpt"])]
HostId = Annotated[str, msgspec.Meta(description="Name of a host.", examples=["host-a"])]
HostOrEmpty = Annotated[str, msgspec.Meta(description="Name of a host; '': none.", examples=["host-a"])]
Rank = Annotated[int, msgspec.Meta(description="Global rank of a worker.", examples=[0])]
Generation = Annotated[
    int, msgspec.Meta(description="Number of the generation; -1: none yet, or it does not apply.", examples=[2])
]
Step = Annotated[int, msgspec.Meta(description="A training step; -1: none.", examples=[1200])]
SizeBytes = Annotated[int, msgspec.Meta(description="A size in bytes.", examples=[536_870_912])]
Message = Annotated[str, msgspec.Meta(description="For a person; '': nothing to say.", examples=[""])]
IncidentId = Annotated[str, msgspec.Meta(description="Identifier of an incident.", examples=["inc-4"])]
DecisionId = Annotated[str, msgspec.Meta(description="Identifier of a decision.", examples=["dec-17"])]
Cursor = Annotated[
    str | None,
    msgspec.Meta(description="Pass it as `before` for the page before; null: there is none.", examples=[None]),
]
