"""Carries out operators' orders, within the same limits as the controller's own decisions."""

from __future__ import annotations

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.orders import Order, OrderKind, OrderState
from services.controller.round import blast_radius
from services.controller.round.round import Round
from services.controller.rules import checkpoint_rules
from services.rules.incident_states import HostEvent

_SMALL_CLUSTER = 10  # with fewer hosts, the limit is one or so, and a person may know better


def settle(round_: Round) -> None:
    """Carry out the orders that stand, and end those that are over."""
    for order in list(round_.orders.values()):
        match order.kind:
            case OrderKind.CORDON:
                _cordon(round_, order)
            case OrderKind.SILENCE:
                _silence(round_, order)
            case OrderKind.APPROVE:
                _approve(round_, order)
            case OrderKind.CHECKPOINT:
                checkpoint_rules.take_order(round_, order)
            case OrderKind.CLEAR:
                if order.requested_at < round_.now - round_.settings.host_failure_window_s:
                    round_.settle_order(order, OrderState.OVER)


def _cordon(round_: Round, order: Order) -> None:
    """Cordon the host, also after it was away: the order stands until the host is uncordoned. The hourly limit is for
    new orders, and for clusters in which it allows more than one host: in smaller ones it is a warning."""
    host = round_.hosts.get(order.target)
    if host is None or host.state in (HostState.CORDONED, HostState.SILENT):
        return
    reason = f"an operator cordoned it{f': {order.reason}' if order.reason else ''}"
    is_new = host.since < order.requested_at
    why = blast_radius.too_many(round_, (host.host_id,)) if is_new else ""
    if why and blast_radius.fleet_of(round_).hosts < _SMALL_CLUSTER:
        reason += f" (beyond the limit of the controller: {why})"
    elif why:
        message = f"{host.host_id} is not cordoned: {why}"
        round_.decide_host(host.host_id, DecisionKind.HOLD, "refuse_to_cordon", f"{message}.")
        round_.settle_order(order, OrderState.REFUSED, message)
        return
    round_.decide_host(host.host_id, DecisionKind.CORDON, "cordon_on_request", f"{host.host_id}: {reason}.")
    round_.change_host(host.host_id, HostEvent.CORDONED, reason)


def _silence(round_: Round, order: Order) -> None:
    if round_.now >= order.until:
        round_.settle_order(order, OrderState.OVER)
    else:
        round_.wake(order.until)


def _approve(round_: Round, order: Order) -> None:
    """An approval is for one action: it is over with the next one, or with its incident. That of a move covers the save
    before it too."""
    incident = round_.incidents.get(order.target)
    action = round_.actions.get(incident.action_id) if incident is not None else None
    save = DecisionKind.EMERGENCY_CHECKPOINT
    is_covered = action is not None and action.plan.kind is save and order.awaited != save.value
    is_used = incident is not None and incident.action_id != order.action_id and not is_covered
    if incident is None or incident.state.closed or is_used:
        round_.settle_order(order, OrderState.OVER)
