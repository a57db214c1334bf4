"""Takes in the results of checks, and carries out operators' orders to check hosts."""

from __future__ import annotations

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.orders import Order, OrderKind, OrderState
from flyball.contracts.reports.host_checks import CheckState, HostCheck
from services.controller.round import blast_radius, check_plans
from services.controller.round.round import Round
from services.controller.round.view import HostView
from services.controller.updates import intake
from services.rules.incident_states import HOST, HostEvent
from services.rules.wording import kept, listed

_SILENT = (HostState.SILENT, HostState.SUSPECT)


def take_in(round_: Round) -> None:
    """Store the results of checks that have ended. A host that failed gets no work."""
    ended: dict[str, list[str]] = {}  # action -> the hosts that wait for its results
    for host in round_.hosts.values():
        if host.check is not None and check_plans.is_running(host):
            action = round_.actions.get(host.check.action_id)
            if action is None or action.state.ended:
                ended.setdefault(host.check.action_id, []).append(host.host_id)
    for action_id, waiting in ended.items():
        action = round_.actions.get(action_id)
        results = check_plans.results(action, round_.now) if action is not None else {}
        unknown = HostCheck(CheckState.UNKNOWN, round_.now, action_id, message="what came of its check is not known")
        for host_id, check in ({host_id: unknown for host_id in waiting} | results).items():
            checked = round_.hosts.get(host_id)
            if checked is None or (checked.job and host_id not in waiting):
                continue  # a helper may get ranks meanwhile, and they disturb its check
            began_at = checked.check.at if checked.check is not None else 0.0
            round_.change_check(host_id, check)
            if check.state is CheckState.FAILED:
                _cordon(round_, round_.hosts[host_id], check, began_at)


def _cordon(round_: Round, host: HostView, check: HostCheck, began_at: float) -> None:
    """Cordon a host, unless an operator released it while it was checked, or too many were cordoned lately."""
    is_overruled = host.since > began_at and host.reason.startswith(intake.RELEASED)
    if is_overruled or HostEvent.CORDONED not in HOST.table[host.state]:
        return
    reason = f"it failed its check: {check.message}"
    if too_many := blast_radius.too_many(round_, (host.host_id,)):
        why = f"{host.host_id}: {reason}. It is not cordoned: {too_many}."
        round_.decide_host(host.host_id, DecisionKind.HOLD, "cordon_a_host_that_failed_its_check", why)
        return
    why = f"{host.host_id}: {reason}. It gets no work until it passes one (flyball uncordon)."
    round_.decide_host(host.host_id, DecisionKind.CORDON, "cordon_a_host_that_failed_its_check", why)
    round_.change_host(host.host_id, HostEvent.CORDONED, reason)


def settle_orders(round_: Round) -> None:
    """Check the hosts that operators want checked, those of one round together; and end the orders that are over."""
    wanted: list[HostView] = []
    for order in [order for key, order in round_.orders.items() if key[0] is OrderKind.CHECK]:
        host = round_.hosts.get(order.target)
        if host is None or check_plans.is_running(host):
            continue
        if host.check is not None and host.check.at >= order.requested_at:
            _settle(round_, order, host, host.check)
        elif why := _why_not(round_, host):
            round_.settle_order(order, OrderState.REFUSED, f"{host.host_id} cannot be checked: {why}")
        else:
            wanted.append(host)
    if not wanted:
        return
    names = [host.host_id for host in wanted]
    free = [host for host in round_.free_hosts(check_plans.NO_JOB) if host.host_id not in names]
    helpers = free if len(wanted) <= 2 else []  # more than two can be told apart by themselves
    with_ = f" with {helpers[0].host_id}" if len(wanted) == 1 and helpers else ""
    round_.decide_check(
        check_plans.check_plan(wanted, helpers, timeout_s=round_.settings.host_check_timeout_s),
        "check_on_request",
        f"An operator wants {listed(names)} checked{with_}: a matrix product on each device, and an all-reduce.",
        {"hosts": kept(names), "host": names[0]},
    )


def _why_not(round_: Round, host: HostView) -> str:
    if host.state in _SILENT or host.left_at or round_.now - host.last_report_at > round_.settings.spare_fresh_s:
        return "it does not report"
    if host.job:
        return f"it has ranks of job {host.job}; drain it first"
    if host.stale_jobs:
        return f"workers of job {next(iter(host.stale_jobs))} still run on it"
    return ""


def _settle(round_: Round, order: Order, host: HostView, check: HostCheck) -> None:
    if order.awaited != DecisionKind.UNCORDON.value:
        round_.settle_order(order, OrderState.OVER)
    elif not check.state.may_work:
        message = f"{host.host_id} stays cordoned: {check.message}"
        round_.settle_order(order, OrderState.REFUSED, message)
        round_.decide_host(host.host_id, DecisionKind.HOLD, "keep_a_host_that_did_not_pass", f"{message}.")
    else:
        round_.settle_order(order, OrderState.OVER)
        if (cordon := round_.orders.get((OrderKind.CORDON, host.host_id))) is not None:
            round_.settle_order(cordon, OrderState.OVER)
        intake.undrain(round_, host, f"{intake.RELEASED}, and it passed its check: it may have work again")
