"""Contract values for tests of the stores."""

from __future__ import annotations

from collections.abc import Sequence

from support.hosts.reports import report
from support.jobs.placements import make_placement

from flyball.contracts.checkpoints import LineageEntry, RestorePlan, branch
from flyball.contracts.cluster import HostFacts, HostRanks, JobSpec, Placement, RankStatus
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    CommandUpdate,
    Decision,
    DecisionKind,
    GenerationPlan,
    Incident,
    IncidentState,
    StartWorkers,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.reports.rank_columns import RankSteps
from flyball.contracts.reports.signals import Report, Signal, SignalBody, WorkerExited
from services.actuator.ports import CommandDraft, PlaybookStep


class Make:
    """Contract values with everything that a test does not care about filled in. Job "job", two ranks per host."""

    T = 1_000.0

    def spec(self, **changes: object) -> JobSpec:
        fields = {"job": "job", "argv": ("train.py",), "workdir": "/tmp", "nnodes": 2, "nproc_per_node": 2}
        return JobSpec(**(fields | changes))

    def exited(self, rank: int = 0, *, generation: int = 1, last_step: int = 7, **changes: object) -> WorkerExited:
        fields = {
            "job": "job",
            "generation": generation,
            "rank": rank,
            "pid": 100 + rank,
            "exit_code": None,
            "signal_number": 9,
            "last_step": last_step,
        }
        return WorkerExited(**(fields | changes))

    def signal(self, seq: int = 1, body: SignalBody | None = None, **changes: object) -> Signal:
        fields = {"source": "host-a", "incarnation": "inc-a", "seq": seq, "at": self.T, "body": body or self.exited()}
        return Signal(**(fields | changes))

    def facts(self, host_id: str = "host-a") -> HostFacts:
        return HostFacts(host_id, "10.0.0.1", "rack-1", f"{host_id}:7000", 29500, "0.1.0", 42)

    def report(
        self,
        host_id: str = "host-a",
        *,
        sent_at: float = T,
        ranks: Sequence[RankStatus] = (),
        steps: Sequence[RankSteps] = (),
        **changes: object,
    ) -> Report:
        made = {"incarnation": f"daemon-{host_id}", "facts": self.facts(host_id)}
        return report(host_id, sent_at, ranks=ranks, steps=steps, **made | changes)

    def hosts(self, *host_ids: str) -> tuple[HostRanks, ...]:
        return tuple(
            HostRanks(host_id, "10.0.0.1", f"{host_id}:7000", (2 * n, 2 * n + 1)) for n, host_id in enumerate(host_ids)
        )

    def grant(self, generation: int = 1, *host_ids: str) -> GenerationPlan:
        return GenerationPlan(
            job="job",
            generation=generation,
            parent=generation - 1 if generation > 1 else None,
            hosts=self.hosts(*(host_ids or ("host-a", "host-b"))),
            peers={},
            parent_lineage=tuple(LineageEntry(g) for g in range(1, generation)),
            restart_count=generation - 1,
        )

    def placement(self, grant: GenerationPlan, restore_step: int | None = None) -> Placement:
        restore = None if restore_step is None else RestorePlan(restore_step, {})
        return make_placement(
            {},
            generation=grant.generation,
            world_size=4,
            hosts=grant.hosts,
            master_address="10.0.0.1",
            master_port=29500,
            lineage=branch(grant.parent_lineage, restored_step=restore_step, generation=grant.generation),
            restore=restore,
            restart_count=grant.restart_count,
        )

    def incident(self, number: int = 1, state: str = "acting", **changes: object) -> Incident:
        fields = {
            "incident_id": f"inc-{number}",
            "job": "job",
            "host_id": "host-a",
            "cause": "worker_killed",
            "state": IncidentState(state),
            "opened_at": self.T,
            "since": self.T,
            "message": "Rank 0 was killed.",
            "generation": 1,
            "observed_at": self.T,
        }
        return Incident(**(fields | changes))

    def start(self, number: int = 1, generation: int = 1) -> Decision:
        """A decision to start the job."""
        grant = self.grant(generation)
        plan = ActionPlan(DecisionKind.START_JOB, "job", self.spec(), generation, next=grant)
        return Decision(
            f"dec-{number}", "", "job", DecisionKind.START_JOB, "Hosts are there.", "start", self.T, {}, plan
        )

    def restart(self, number: int = 2, *, incident: str = "inc-1", generation: int = 1, **changes: object) -> Decision:
        """A decision to restart `generation` in place."""
        fields = {
            "kind": DecisionKind.RESTART_IN_PLACE,
            "job": "job",
            "spec": self.spec(),
            "generation": generation,
            "stop_hosts": ("host-a", "host-b"),
            "next": self.grant(generation + 1),
        }
        plan = ActionPlan(**(fields | changes))
        return Decision(
            f"dec-{number}", incident, "job", plan.kind, "Rank 0 was killed.", "restart_in_place", self.T, {}, plan
        )

    def stop_step(self, decision: Decision) -> PlaybookStep:
        """The first move of a restart."""
        plan = decision.action
        assert plan is not None
        action_id = decision.decision_id.replace("dec", "act")
        drafts = tuple(
            CommandDraft(f"{action_id}.stop.{host}.1", host, StopWorkers("job", plan.generation, 0.0), 15.0)
            for host in plan.stop_hosts
        )
        return PlaybookStep("stop", ActionState.DISPATCHED, drafts, message="stopping")

    def start_step(self, decision: Decision, restore_step: int | None = None) -> PlaybookStep:
        """The move that starts the granted generation."""
        plan = decision.action
        assert plan is not None and plan.next is not None
        placement = self.placement(plan.next, restore_step)
        action_id = decision.decision_id.replace("dec", "act")
        drafts = tuple(
            CommandDraft(
                f"{action_id}.start.{h.host_id}.1", h.host_id, StartWorkers(spec=plan.spec, placement=placement), 30.0
            )
            for h in placement.hosts
        )
        return PlaybookStep(
            "start", ActionState.DISPATCHED, drafts, "starting", placement=placement, restore=placement.restore
        )

    def update(self, command_id: str, state: str = "succeeded", **changes: object) -> CommandUpdate:
        fields = {
            "command_id": command_id,
            "host_id": command_id.split(".")[2],
            "incarnation": "daemon",
            "state": UpdateState(state),
            "at": self.T,
        }
        return CommandUpdate(**(fields | changes))
