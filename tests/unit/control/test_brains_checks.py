"""Hosts are checked before a job's first step, after hangs without a culprit, on request, and before they are
uncordoned; and the playbook's rounds of a check."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
import pytest
from support.policy.checked import advance, decide
from support.policy.views import (
    HOSTS,
    JOB,
    NOW,
    SAVED,
    SETTINGS,
    SPEC,
    action,
    decided,
    host,
    incident,
    submitted,
    view,
)

from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    CheckHost,
    Command,
    CommandResult,
    CommandUpdate,
    DecisionKind,
    HostCheckPlan,
    HostToCheck,
    IncidentState,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.identity import Fence
from flyball.contracts.orders import Order, OrderKind, OrderState
from flyball.contracts.reports.host_checks import CheckMeasure, CheckStage, CheckState, HostCheck
from flyball.contracts.reports.rank_stands import RankStand
from services.actuator.ports import ActionProgress, CommandDraft, OutboxCommand, PlaybookStep
from services.controller.round import check_plans
from services.controller.round.view import ActionView, HostView, JobView, PastFailure, View

CHECKED = msgspec.structs.replace(SPEC, check_nodes=True)


def waiting(**more: bool) -> JobView:
    spec = msgspec.structs.replace(CHECKED, **more)
    return msgspec.structs.replace(submitted(), spec=spec, submitted_at=NOW - 50.0)


def check(state: CheckState, *, at: float = NOW - 5.0, message: str = "") -> HostCheck:
    return HostCheck(state, at, "act-9", 1, 0.1, 0.2, message)


def free(*checks: HostCheck | None) -> tuple[HostView, ...]:
    return tuple(host(name, check=found) for name, found in zip("abcdef", checks, strict=False))


def measures(group: str, *, failed: CheckStage | None = None, round_: int = 1) -> list[CheckMeasure]:
    return [CheckMeasure(name, round_, tuple(group), 1, 0.1, 0.2, failed, "why" if failed else "") for name in group]


def over(hosts: Iterable[HostView], found: list[CheckMeasure], **more: object) -> ActionView:
    plan = check_plans.check_plan(list(hosts), [], timeout_s=60.0)
    facts = {"action_id": "act-9", "incident_id": "", "plan": plan, "phase": "check", "checks": tuple(found), **more}
    return action(**facts)


# --- before the first step -------------------------------------------------------------------------------------------


def test_before_the_first_step_as_many_hosts_are_checked_as_the_job_needs() -> None:
    decision = decided(decide(view(job=waiting(), hosts=free(None, None, None)), [], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (DecisionKind.CHECK_HOSTS, "check_before_the_first_step")
    assert decision.action is not None and decision.action.check is not None
    assert [(h.host_id, h.is_helper) for h in decision.action.check.hosts] == [("a", False), ("b", False), ("c", True)]
    assert decision.action.stop_hosts == ("a", "b") and not decision.action.check.stops


@pytest.mark.parametrize(
    ("flags", "checks", "starts_on"),
    [
        ({}, "passed passed passed", "ab"),
        ({}, "failed passed slow", "bc"),
        ({"exclude_stragglers": True}, "passed slow passed", "ac"),
        ({"check_nodes": False, "exclude_stragglers": True}, "passed slow passed", "ac"),
        ({"check_nodes": False}, "failed failed failed", "ab"),  # nobody asked
        ({}, "passed unknown passed", "ac"),
    ],
)
def test_the_job_starts_on_hosts_that_passed(flags: dict[str, bool], checks: str, starts_on: str) -> None:
    hosts = free(*(check(CheckState(word)) for word in checks.split()))
    decision = decided(decide(view(job=waiting(**flags), hosts=hosts), [], SETTINGS, NOW))
    assert decision.kind is DecisionKind.START_JOB and decision.action is not None and decision.action.next is not None
    assert "".join(part.host_id for part in decision.action.next.hosts) == starts_on


@pytest.mark.parametrize(
    ("hosts", "checked"),
    [
        (free(check(CheckState.PASSED), check(CheckState.FAILED), None), "c"),
        (free(check(CheckState.PASSED, at=NOW - 60.0), check(CheckState.PASSED)), "a"),  # before it was submitted
        (free(check(CheckState.UNKNOWN, at=NOW - 40.0), check(CheckState.UNKNOWN, at=NOW - 40.0), None), "ab"),
    ],
)
def test_a_host_that_did_not_pass_is_replaced_or_checked_again(hosts: tuple[HostView, ...], checked: str) -> None:
    decision = decided(decide(view(job=waiting(), hosts=hosts), [], SETTINGS, NOW))
    assert decision.action is not None and "".join(decision.action.stop_hosts) == checked


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (free(check(CheckState.PASSED)), "waits for hosts: it needs 2 hosts, free: a"),
        (
            free(check(CheckState.UNKNOWN, message="one of these two"), check(CheckState.UNKNOWN, message="m")),
            "waits for hosts that pass their check: it needs 2, 0 passed (a unknown: one of these two; b unknown: m)",
        ),
    ],
)
def test_a_job_that_cannot_start_says_why(hosts: tuple[HostView, ...], message: str) -> None:
    outcome = decide(view(job=waiting(), hosts=hosts), [], SETTINGS, NOW)
    assert outcome.decisions == () and outcome.jobs[-1].message == message


def test_while_its_check_runs_the_job_waits_and_a_stop_ends_the_check() -> None:
    hosts = free(*2 * [check(CheckState.RUNNING)])
    plan = check_plans.check_plan(hosts, [], timeout_s=60.0, spec=CHECKED)
    running = over(hosts, [], plan=plan, state=ActionState.DISPATCHED, message="checking hosts, round 1: a, b")
    seen = view(job=waiting(), hosts=hosts, actions=[running])
    outcome = decide(seen, [], SETTINGS, NOW)
    assert outcome.decisions == () and outcome.checks == ()
    stopped = msgspec.structs.replace(waiting(), stop_requested=True)
    outcome = decide(msgspec.structs.replace(seen, jobs=(stopped,)), [], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.STOP_JOB and outcome.superseded_actions == ("act-9",)


# --- results ---------------------------------------------------------------------------------------------------------


def test_results_are_taken_in_once_and_a_bad_host_is_cordoned() -> None:
    hosts = free(*4 * [check(CheckState.RUNNING)])
    found = [
        *measures("ab", failed=CheckStage.GROUP),
        *measures("cd"),
        *measures("ac", round_=2),
        *measures("bd", round_=2, failed=CheckStage.GROUP),
    ]
    outcome = decide(view(hosts=hosts, actions=[over(hosts, found)]), [], SETTINGS, NOW)
    states = {change.host_id: change.check.state for change in outcome.checks}
    assert states == dict.fromkeys("acd", CheckState.PASSED) | {"b": CheckState.FAILED}
    (cordon,) = [d for d in outcome.decisions if d.kind is DecisionKind.CORDON]
    assert cordon.rule == "cordon_a_host_that_failed_its_check"
    assert "it failed together with a, which passed with another host: why." in cordon.reason
    assert [(h.host_id, h.state) for h in outcome.hosts if h.host_id == "b"] == [("b", HostState.CORDONED)]


@pytest.mark.parametrize("state", [ActionState.SUPERSEDED, ActionState.TIMED_OUT, ActionState.FAILED])
def test_a_check_that_was_broken_off_shows_nothing(state: ActionState) -> None:
    hosts = free(*2 * [check(CheckState.RUNNING)])
    outcome = decide(view(hosts=hosts, actions=[over(hosts, measures("ab"), state=state)]), [], SETTINGS, NOW)
    assert {change.check.state for change in outcome.checks} == {CheckState.UNKNOWN}
    assert all(change.state is not HostState.CORDONED for change in outcome.hosts)
    lost = decide(view(hosts=hosts), [], SETTINGS, NOW)  # the database does not have the action any more
    assert {change.check.state for change in lost.checks} == {CheckState.UNKNOWN}


# --- orders ----------------------------------------------------------------------------------------------------------


def ordered(seen: View, *targets: str, uncordons: bool = False, kinds: tuple[OrderKind, ...] = ()) -> View:
    awaited = "uncordon" if uncordons else ""
    orders = [Order(OrderKind.CHECK, target, NOW - 10.0, awaited=awaited) for target in targets]
    orders += [Order(kind, target, NOW - 99.0) for kind in kinds for target in targets]
    return msgspec.structs.replace(seen, orders=tuple(orders))


def test_hosts_of_one_order_are_checked_together_and_then_the_order_is_over() -> None:
    seen = view(hosts=(*HOSTS, host("d"), host("e")))
    decision = decided(decide(ordered(seen, "c", "d"), [], SETTINGS, NOW))
    assert (decision.kind, decision.rule, decision.job) == (DecisionKind.CHECK_HOSTS, "check_on_request", "")
    assert decision.action is not None and decision.action.check is not None
    assert [(h.host_id, h.is_helper) for h in decision.action.check.hosts] == [("c", False), ("d", False), ("e", True)]

    running = view(hosts=(*HOSTS[:2], host("c", check=check(CheckState.RUNNING))))
    plan_open = over(running.hosts[2:], [], state=ActionState.DISPATCHED)
    assert decide(msgspec.structs.replace(ordered(running, "c"), actions=(plan_open,)), [], SETTINGS, NOW).empty
    done = view(hosts=(*HOSTS[:2], host("c", check=check(CheckState.PASSED))))
    (change,) = decide(ordered(done, "c"), [], SETTINGS, NOW).orders
    assert change.state is OrderState.OVER


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (host("c", job="job"), "it has ranks of job job; drain it first"),
        (host("c", last_report_at=NOW - 60.0), "it does not report"),
        (host("c", state=HostState.SILENT), "it does not report"),
        (host("c", stale_jobs={"old": 3}), "workers of job old still run on it"),
    ],
)
def test_a_host_that_cannot_be_checked_is_refused(target: HostView, why: str) -> None:
    outcome = decide(ordered(view(hosts=(*HOSTS[:2], target)), "c"), [], SETTINGS, NOW)
    (change,) = outcome.orders
    assert (change.state, change.message) == (OrderState.REFUSED, f"c cannot be checked: {why}")


def test_a_cordoned_host_returns_once_it_has_passed() -> None:
    cordoned = {"state": HostState.CORDONED}
    seen = ordered(view(hosts=(*HOSTS[:2], host("c", **cordoned))), "c", uncordons=True, kinds=(OrderKind.CORDON,))
    assert decided(decide(seen, [], SETTINGS, NOW)).kind is DecisionKind.CHECK_HOSTS

    passed = view(hosts=(*HOSTS[:2], host("c", check=check(CheckState.PASSED), **cordoned)))
    outcome = decide(ordered(passed, "c", uncordons=True, kinds=(OrderKind.CORDON,)), [], SETTINGS, NOW)
    assert [(change.order.kind, change.state) for change in outcome.orders] == [
        (OrderKind.CHECK, OrderState.OVER),
        (OrderKind.CORDON, OrderState.OVER),
    ]
    assert outcome.hosts[-1].state is HostState.SPARE and decided(outcome).kind is DecisionKind.UNCORDON

    failed = view(hosts=(*HOSTS[:2], host("c", check=check(CheckState.FAILED, message="CUDA error"), **cordoned)))
    outcome = decide(ordered(failed, "c", uncordons=True, kinds=(OrderKind.CORDON,)), [], SETTINGS, NOW)
    (change,) = outcome.orders
    assert change.state is OrderState.REFUSED
    assert not outcome.hosts


# --- hangs -----------------------------------------------------------------------------------------------------------


def hung(stands: Iterable[RankStand], *, times: int, hosts: tuple[HostView, ...] = HOSTS, **more: object) -> View:
    plan = ActionPlan(DecisionKind.TAKE_STACKS, "job", SPEC, 2, stop_hosts=("a", "b"))
    acting = incident(cause="rank_stalled", generation=2, host_id="a", message="Ranks 0, 1 stand.", decisions_made=0)
    seen = {"plan": plan, "state": ActionState.SUCCEEDED, "phase": "stacks", "stands": tuple(stands), **more}
    failures = tuple(PastFailure(3 - number, "rank_stalled", "", "", 50) for number in range(1, times + 1))
    job = msgspec.structs.replace(JOB, failures=failures)
    return view(job=job, hosts=hosts, incidents=[acting], actions=[action(**seen)], copies=SAVED)


REDUCE = RankStand(0, "collective", "all_reduce", "all_reduce (c10d.py:1)", "main (train.py:9)", "in futex")
TOGETHER = (REDUCE, msgspec.structs.replace(REDUCE, rank=1))
ALONE = (REDUCE, RankStand(1, "data_loader", "", "_next_data (dataloader.py:1)", "main (train.py:7)", "in poll"))


@pytest.mark.parametrize(
    ("stands", "times", "kind"),
    [
        (TOGETHER, 2, DecisionKind.CHECK_HOSTS),
        ((), 2, DecisionKind.CHECK_HOSTS),
        (TOGETHER, 1, DecisionKind.RESTART_IN_PLACE),
        (ALONE, 2, DecisionKind.RESTART_IN_PLACE),
    ],
)
def test_hosts_are_checked_when_a_hang_repeats_and_nothing_shows_the_culprit(
    stands: tuple[RankStand, ...], times: int, kind: DecisionKind
) -> None:
    decision = decided(decide(hung(stands, times=times), [], SETTINGS, NOW))
    assert decision.kind is kind
    if kind is DecisionKind.CHECK_HOSTS:
        assert decision.action is not None and decision.action.check is not None and decision.action.check.stops
        assert decision.action.generation == 2 and decision.action.stop_hosts == ("a", "b")
        assert decision.rule == "check_after_a_hang_without_a_culprit" and "hang number 2" in decision.reason


def test_the_host_that_fails_is_left_and_the_others_restart_where_they_are() -> None:
    hosts = (
        host("a", job="job", check=check(CheckState.RUNNING)),
        host("b", job="job", check=check(CheckState.RUNNING)),
        host("c"),
    )
    plan = check_plans.check_plan(hosts[:2], hosts[2:], timeout_s=60.0, spec=SPEC, generation=2, stops=True)
    found = [*measures("ab", failed=CheckStage.GROUP), *measures("ac", round_=2)]
    done = {"plan": plan, "phase": "check", "checks": tuple(found), "stands": (), "action_id": "act-9"}
    seen = hung((), times=2, hosts=hosts)
    acting = msgspec.structs.replace(seen.incidents[0], action_id="act-9")
    seen = msgspec.structs.replace(seen, incidents=(acting,), actions=(action(**done),))
    outcome = decide(seen, [], SETTINGS, NOW)
    last = outcome.decisions[-1]
    assert (last.kind, last.rule) == (DecisionKind.MIGRATE_TO_SPARE, "migrate_to_spare")
    assert last.evidence["from"] == "b"
    assert outcome.incidents[-1].host_id == "b" and outcome.incidents[-1].state is IncidentState.ACTING

    for found in (measures("ab"), measures("ab", failed=CheckStage.VOID)):
        passed = msgspec.structs.replace(seen, actions=(action(**{**done, "checks": tuple(found)}),))
        last = decide(passed, [], SETTINGS, NOW).decisions[-1]
        assert last.kind is DecisionKind.RESTART_IN_PLACE


# --- the playbook ----------------------------------------------------------------------------------------------------


class Played:
    """An action to check hosts, as its hosts answer."""

    def __init__(self, hosts: str, helpers: str = "", *, stops: bool = False) -> None:
        asked = [HostToCheck(name, f"10.0.0.{name}", 4000, name in helpers) for name in hosts + helpers]
        plan = HostCheckPlan(tuple(asked), 60.0, stops)
        whole = ActionPlan(
            DecisionKind.CHECK_HOSTS, "job" if stops else "", SPEC, 2, tuple(hosts), deadline_s=400.0, check=plan
        )
        self.now = NOW
        self.progress = ActionProgress("act-9", "dec-9", "", whole, ActionState.QUEUED, "", 1, NOW, ())

    def step(self, *, after_s: float = 1.0) -> PlaybookStep:
        self.now += after_s
        step = advance(self.progress, self.now)
        sent = tuple(OutboxCommand(_command(draft), step.phase, self.now, None) for draft in step.commands)
        self.progress = msgspec.structs.replace(
            self.progress,
            phase=step.phase,
            state=step.state,
            attempt=step.attempt,
            commands=self.progress.commands + sent,
        )
        return step

    def answer(self, measured: Iterable[CheckMeasure], *, free_port: int = 0) -> None:
        by_host = {measure.host_id: measure for measure in measured}
        commands = []
        for record in self.progress.commands:
            body, found = record.command.body, by_host.get(record.command.host_id)
            if isinstance(body, CheckHost) and record.update is None and found and found.round == body.round:
                result = CommandResult(check=found, free_port=free_port)
                name = record.command.command_id
                update = CommandUpdate(name, found.host_id, "i", UpdateState.SUCCEEDED, self.now, result=result)
                commands.append(msgspec.structs.replace(record, update=update))
            else:
                commands.append(record)
        self.progress = msgspec.structs.replace(self.progress, commands=tuple(commands))

    def refuse(self, host_id: str) -> None:
        def refused(record: OutboxCommand) -> OutboxCommand:
            if record.command.host_id != host_id or record.update is not None:
                return record
            name = record.command.command_id
            return msgspec.structs.replace(
                record, update=CommandUpdate(name, host_id, "i", UpdateState.REFUSED, self.now, message="old fence")
            )

        self.progress = msgspec.structs.replace(self.progress, commands=tuple(map(refused, self.progress.commands)))


def _command(draft: CommandDraft) -> Command:
    return Command(draft.command_id, "act-9", draft.host_id, Fence(1, 2), draft.body, draft.deadline_s)


def groups(step: PlaybookStep) -> list[tuple[str, ...]]:
    bodies = [draft.body for draft in step.commands if isinstance(draft.body, CheckHost)]
    assert all(body.timeout_s < draft.deadline_s for body, draft in zip(bodies, step.commands, strict=True))
    return [group for group, _ in itertools.groupby(body.group for body in bodies)]


def test_pairs_are_regrouped_with_hosts_that_passed_and_get_the_newest_port() -> None:
    played = Played("abcd")
    assert groups(played.step()) == [("a", "b"), ("c", "d")]
    assert played.step().commands == ()
    played.answer([*measures("ab", failed=CheckStage.GROUP), *measures("cd")], free_port=5000)
    second = played.step()
    assert groups(second) == [("a", "c"), ("b", "d")] and second.attempt == 2
    bodies = [draft.body for draft in second.commands if isinstance(draft.body, CheckHost)]
    assert {(body.master_address, body.master_port) for body in bodies} == {("10.0.0.a", 5000), ("10.0.0.b", 5000)}
    assert len({body.check_id for body in bodies}) == 2
    played.answer([*measures("ac", round_=2), *measures("bd", round_=2, failed=CheckStage.GROUP)])
    ended = played.step()
    assert (ended.state, ended.message) == (ActionState.SUCCEEDED, "b failed; a, c, d passed")


@pytest.mark.parametrize("job", ["job", ""])
def test_a_check_for_a_job_takes_the_network_of_its_ranks(job: str) -> None:
    spec = msgspec.structs.replace(
        SPEC, env={"GLOO_SOCKET_IFNAME": "ib0", "SECRET": "x"}, user_env={"NCCL_IB_HCA": "mlx5", "LANG": "C"}
    )
    played = Played("ab")
    plan = msgspec.structs.replace(played.progress.plan, job=job, spec=spec)
    played.progress = msgspec.structs.replace(played.progress, plan=plan)
    envs = [draft.body.env for draft in played.step().commands if isinstance(draft.body, CheckHost)]
    assert envs == 2 * [{"GLOO_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx5"} if job else {}]


def test_the_group_of_a_host_that_failed_by_itself_is_given_up_at_once() -> None:
    played = Played("ab", "c")
    played.step()
    played.answer(measures("ab", failed=CheckStage.DEVICE)[:1])
    assert groups(played.step()) == [("b", "c")]
    late = [msgspec.structs.replace(measures("ab", failed=CheckStage.VOID)[1], message="it was broken off")]
    played.answer(late)
    played.answer(measures("bc", round_=2))
    assert played.step().message == "a failed; b passed"


def test_a_host_that_does_not_answer_has_failed() -> None:
    played = Played("abcd")
    played.step()
    played.answer([*measures("ab", failed=CheckStage.GROUP)[:1], *measures("cd")])
    assert played.step().commands == ()
    assert groups(played.step(after_s=100.0)) == [("a", "c")]
    played.answer(measures("ac", round_=2))
    assert played.step().message == "b failed; a, c, d passed"


def test_a_host_whose_daemon_refuses_is_asked_again_and_blames_nobody() -> None:
    played = Played("abcd")
    played.step()
    played.answer([*measures("ab", failed=CheckStage.GROUP)[1:], *measures("cd")])
    played.refuse("a")
    assert groups(played.step()) == [("a", "c"), ("b", "d")]
    played.answer([*measures("ac", round_=2)[1:], *measures("bd", round_=2)])
    played.refuse("a")
    assert groups(played.step()) == [("a", "b")], "another host that passed"
    for round_ in (3, 4, 5):
        played.refuse("a")
        played.answer(measures("ab", failed=CheckStage.GROUP, round_=round_)[1:])
        last = played.step()
    assert (last.state, last.message) == (ActionState.SUCCEEDED, "a could not be told from a bad host; b, c, d passed")


def test_daemons_that_all_refuse_are_asked_in_every_round_and_no_more() -> None:
    played = Played("ab")
    for _ in range(5):
        assert groups(played.step()) == [("a", "b")]
        played.refuse("a")
        played.refuse("b")
    last = played.step()
    assert (last.state, last.message) == (ActionState.SUCCEEDED, "a, b could not be told from a bad host")


def test_a_generation_that_hangs_is_stopped_first_whatever_its_hosts_answer() -> None:
    played = Played("ab", stops=True)
    first = played.step()
    assert [type(draft.body) for draft in first.commands] == [StopWorkers, StopWorkers]
    assert played.step().commands == ()
    assert groups(played.step(after_s=60.0)) == [("a", "b")]  # nobody answered
    played.answer(measures("ab", failed=CheckStage.GROUP))
    assert played.step().message == "a, b could not be told from a bad host"


def test_at_its_deadline_the_action_says_what_is_known() -> None:
    played = Played("ab")
    played.step()
    ended = played.step(after_s=401.0)
    assert ended.state is ActionState.SUCCEEDED


def test_a_job_that_was_submitted_does_not_start_while_a_host_is_checked() -> None:
    hosts = free(check(CheckState.RUNNING), None)
    open_ = over(hosts[:1], [], state=ActionState.DISPATCHED)
    outcome = decide(view(job=submitted(), hosts=hosts, actions=[open_]), [], SETTINGS, NOW)
    assert outcome.decisions == () and outcome.jobs[-1].state is JobState.SUBMITTED
