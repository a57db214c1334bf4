"""Replies about what happened: incidents, decisions, actions, events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from flyball.contracts.checkpoints import Tier
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Alternative,
    CommandResult,
    DecisionKind,
    FailedStart,
    Harm,
    IncidentState,
)
from flyball.contracts.events import Event
from flyball.contracts.reports.signals import SignalBody
from services.api.replies.fields import (
    Cursor,
    DecisionId,
    Generation,
    HostId,
    HostOrEmpty,
    IncidentId,
    JobOrEmpty,
    Message,
    Rank,
    SizeBytes,
    Step,
    WallClock,
    WallClockOrNull,
)


class RestoreReply(msgspec.Struct, frozen=True):
    """Where one rank's bytes came from."""

    rank: Rank
    host_id: HostId
    step: Step
    tier: Tier
    source_host: HostOrEmpty
    size_bytes: SizeBytes
    socket_bytes: Annotated[int, msgspec.Meta(description="Payload bytes received through a socket.", examples=[0])]
    transport: Annotated[str, msgspec.Meta(description='"rdma", "tcp"; \'\': not fetched.', examples=["tcp"])]
    tier_bytes: Annotated[Mapping[str, int], msgspec.Meta(description="Bytes by tier, if from several.")]
    seconds: Annotated[float, msgspec.Meta(description="Duration.", examples=[0.21])]
    at: WallClock


class IncidentChange(msgspec.Struct, frozen=True):
    """One entry of an incident's timeline."""

    at: WallClock
    state: IncidentState
    cause: Annotated[str, msgspec.Meta(examples=["worker_killed"])]
    message: Message


class IncidentReply(msgspec.Struct, frozen=True):
    """One incident: cause, times, signals, decisions, lost steps, sources of restores, timeline."""

    incident_id: IncidentId
    job: JobOrEmpty
    host_id: HostOrEmpty
    cause: Annotated[str, msgspec.Meta(description="What went wrong.", examples=["worker_killed"])]
    state: IncidentState
    opened_at: WallClock
    since: WallClock
    message: Message
    generation: Generation
    failed_step: Step
    fault_at: WallClock
    durations_s: Annotated[
        dict[str, float],
        msgspec.Meta(description="Undetected, deciding, acting, verifying: from the fault on, of what is over."),
    ]
    observed_at: WallClockOrNull
    action_id: Annotated[str, msgspec.Meta(description="The newest action; '': none.", examples=["act-17"])]
    hold_until: WallClockOrNull
    holding_for: Annotated[str, msgspec.Meta(description="What a hold waits for; '': it does not.", examples=[""])]
    decisions_made: Annotated[
        int, msgspec.Meta(description="Decisions that led to an action about its newest fault.", examples=[1])
    ]
    decisions_before: Annotated[
        int, msgspec.Meta(description="Likewise, about earlier faults since the job's last new step.", examples=[0])
    ]
    resolved_at: WallClockOrNull
    restored_step: Step
    lost_steps: Annotated[int, msgspec.Meta(description="Steps to recompute; -1: not known yet.", examples=[0])]
    failed_starts: tuple[FailedStart, ...]
    hosts: Annotated[
        tuple[str, ...], msgspec.Meta(description="For saves_failing: where saves fail; for domain_silent: all of it.")
    ]
    harm: Harm | None
    excess_s: Annotated[float, msgspec.Meta(description="For straggler: seconds per step above the usual.")]
    expires_at: Annotated[
        float, msgspec.Meta(description="For straggler: when it is over, seconds since 1970; 0.0: never.")
    ]
    part_of: Annotated[str, msgspec.Meta(description="The domain_silent incident that it belongs to; '': none.")]
    parts: Annotated[tuple[str, ...], msgspec.Meta(description="For domain_silent: the incidents of the jobs.")]
    decided_at: WallClockOrNull
    signal: Annotated[str, msgspec.Meta(description="Kind that revealed the cause.", examples=["worker_exited"])]
    signals: Annotated[tuple[str, ...], msgspec.Meta(description="Kinds of all its signals.")]
    decisions: Annotated[tuple[DecisionKind, ...], msgspec.Meta(description="Those that acted, in order.")]
    decision_ids: Annotated[tuple[str, ...], msgspec.Meta(description="Of all decisions, in order.")]
    restored_from: tuple[RestoreReply, ...]
    timeline: tuple[IncidentChange, ...]


class IncidentPage(msgspec.Struct, frozen=True):
    """Incidents, oldest first."""

    items: tuple[IncidentReply, ...]
    next_before: Cursor


# --- decisions -------------------------------------------------------------------------------------------------------

Evidence = Annotated[
    Mapping[str, str | int | float | bool | None], msgspec.Meta(description="The numbers quoted in the reason.")
]


class DecisionBasis(msgspec.Struct, frozen=True):
    """One decision with its reason."""

    decision_id: DecisionId
    incident_id: Annotated[str, msgspec.Meta(description="'': without an incident.", examples=["inc-4"])]
    job: JobOrEmpty
    kind: DecisionKind
    reason: Annotated[str, msgspec.Meta(examples=["Rank 1 was killed by signal 9: restart it in place."])]
    rule: Annotated[str, msgspec.Meta(description="The policy rule that decided.", examples=["restart_in_place"])]
    at: WallClock
    evidence: Evidence
    alternatives: Annotated[tuple[Alternative, ...], msgspec.Meta(description="Cheapest first.")]
    generation: Generation
    next_generation: Generation


class DecisionReply(DecisionBasis, frozen=True):
    """One decision with its reason and the state of its action."""

    action_state: Annotated[ActionState | None, msgspec.Meta(description="null: a hold, which has no action.")]
    action_phase: Annotated[str | None, msgspec.Meta(description="Phase of the playbook.", examples=["verify"])]


class DecisionPage(msgspec.Struct, frozen=True):
    """Decisions, oldest first."""

    items: tuple[DecisionReply, ...]
    next_before: Cursor


class SignalReply(msgspec.Struct, frozen=True):
    """One observation that led to a decision."""

    at: WallClock
    stored_at: WallClock
    source: Annotated[str, msgspec.Meta(description="Its observer.", examples=["host-a"])]
    kind: Annotated[str, msgspec.Meta(examples=["worker_exited"])]
    body: SignalBody


class ActionChange(msgspec.Struct, frozen=True):
    """One step of an action."""

    at: WallClock
    phase: Annotated[str, msgspec.Meta(examples=["quiesce"])]
    state: ActionState
    message: Message


class CommandReply(msgspec.Struct, frozen=True):
    """One command to a host, and its answer."""

    command_id: Annotated[str, msgspec.Meta(examples=["act-3f9a01c2-17.stop.host-a.1"])]
    host_id: HostId
    kind: Annotated[str, msgspec.Meta(examples=["stop_workers"])]
    phase: Annotated[str, msgspec.Meta(examples=["quiesce"])]
    epoch: Annotated[int, msgspec.Meta(description="Of the controller's lease.", examples=[1])]
    generation: Generation
    state: Annotated[
        str,
        msgspec.Meta(description="queued, dispatched, or that of the answer.", examples=["succeeded"]),
    ]
    code: Annotated[str, msgspec.Meta(description="Of the error; '': none.", examples=[""])]
    message: Message
    created_at: WallClock
    dispatched_at: WallClockOrNull
    answered_at: WallClockOrNull
    result: CommandResult | None


class ActionReply(msgspec.Struct, frozen=True):
    """What was done: the plan, the steps taken, the commands with their answers."""

    action_id: Annotated[str, msgspec.Meta(examples=["act-17"])]
    state: ActionState
    phase: Annotated[str, msgspec.Meta(examples=["verify"])]
    attempt: Annotated[int, msgspec.Meta(examples=[1])]
    message: Message
    started_at: WallClock
    ended_at: WallClockOrNull
    plan: ActionPlan
    phases: tuple[ActionChange, ...]
    commands: tuple[CommandReply, ...]
    restored_from: tuple[RestoreReply, ...]


class StandReply(msgspec.Struct, frozen=True):
    """Where one rank of a job that hangs stood. A field that is not known is ''."""

    rank: Rank
    kind: Annotated[str, msgspec.Meta(examples=["collective"])]
    call: Annotated[str, msgspec.Meta(examples=["all_reduce"])]
    place: str
    caller: str
    process: str
    stack: str
    note: str
    host_id: HostId


class IncidentDecision(DecisionBasis, frozen=True):
    """One decision about an incident, and what was done."""

    action: Annotated[ActionReply | None, msgspec.Meta(description="null: a hold.")]
    stands: Annotated[tuple[StandReply, ...], msgspec.Meta(description="Of a hang: by rank.")]


class StoryLine(msgspec.Struct, frozen=True):
    """One thing that happened in an incident."""

    at: WallClock
    part: Literal["signal", "state", "decision", "alternative", "action"]
    what: Annotated[
        str, msgspec.Meta(description="Kind, state, or phase and state of an action.", examples=["worker_exited"])
    ]
    detail: Message
    about: Annotated[str, msgspec.Meta(description="Decision or action; '': neither.", examples=["dec-17"])]


class IncidentStory(IncidentReply, frozen=True):
    """One incident with everything that belongs to it."""

    observed: Annotated[tuple[SignalReply, ...], msgspec.Meta(description="In the order of storing; the newest 2000.")]
    decided: Annotated[tuple[IncidentDecision, ...], msgspec.Meta(description="In order; the newest 100.")]
    story: Annotated[tuple[StoryLine, ...], msgspec.Meta(description="All of it in the order of time.")]


class ListedSignal(SignalReply, frozen=True):
    """One signal and what it is about."""

    signal_id: Annotated[str, msgspec.Meta(examples=["sig-42"])]
    job: JobOrEmpty
    generation: Generation
    host_id: HostOrEmpty


class SignalPage(msgspec.Struct, frozen=True):
    """Signals in the order of storing."""

    items: tuple[ListedSignal, ...]
    next_before: Cursor


class ListedAction(msgspec.Struct, frozen=True):
    """One action, without its steps."""

    action_id: Annotated[str, msgspec.Meta(examples=["act-17"])]
    decision_id: DecisionId
    incident_id: Annotated[str, msgspec.Meta(description="'': without an incident.", examples=["inc-4"])]
    job: JobOrEmpty
    kind: DecisionKind
    state: ActionState
    phase: Annotated[str, msgspec.Meta(examples=["verify"])]
    attempt: Annotated[int, msgspec.Meta(examples=[1])]
    message: Message
    started_at: WallClock
    ended_at: WallClockOrNull


class ActionStory(ListedAction, frozen=True):
    """One action with its plan, phases and commands."""

    plan: ActionPlan
    phases: tuple[ActionChange, ...]
    commands: tuple[CommandReply, ...]
    restored_from: tuple[RestoreReply, ...]


class ActionPage(msgspec.Struct, frozen=True):
    """Actions in the order of their decisions."""

    items: tuple[ListedAction, ...]
    next_before: Cursor


class DecisionStory(DecisionBasis, frozen=True):
    """One decision with everything that belongs to it."""

    epoch: Annotated[int, msgspec.Meta(description="Of the controller's lease.", examples=[1])]
    incident: IncidentReply | None
    signals: Annotated[tuple[SignalReply, ...], msgspec.Meta(description="Those stored before it, in order.")]
    action: Annotated[ActionReply | None, msgspec.Meta(description="null: a hold.")]
    stands: Annotated[tuple[StandReply, ...], msgspec.Meta(description="Of a hang: by rank.")]


# --- the event log ---------------------------------------------------------------------------------------------------


class EventReply(msgspec.Struct, frozen=True):
    """One event and its position in the log."""

    position: Annotated[int, msgspec.Meta(examples=[42])]
    event: Event


class EventPage(msgspec.Struct, frozen=True):
    """Events in the order of the log."""

    items: tuple[EventReply, ...]
    next_after: Annotated[int, msgspec.Meta(description="Pass it as `after` for the next page.", examples=[42])]
