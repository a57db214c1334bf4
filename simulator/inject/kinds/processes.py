"""Faults by signals: ranks, engines and daemons that are killed, stopped, or run a part of the time only."""

from __future__ import annotations

import signal
import threading

from flyball.contracts.errors import NotFound, UsageError
from simulator.inject.faults import running_worker
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.processes import LiveProcess, look_at, send


def of_process(process: LiveProcess) -> Plan:
    return {"pid": process.pid, "start_ticks": process.start_ticks}


def send_to(plan: Plan, number: signal.Signals) -> bool:
    """Signal the process of a plan, and none that got its pid later."""
    found = look_at(int(plan["pid"]))
    return found is not None and found.start_ticks == plan["start_ticks"] and send(found, number)


def signal_planned(plan: Plan, number: signal.Signals) -> None:
    if not send_to(plan, number):
        raise NotFound(
            f"The process {plan['pid']} has ended: nothing was done.", hint="wait until it runs again, then try again"
        )


class _OfRank(RealFault):
    target = FaultTarget.RANK

    def plan(self, site: FaultSite) -> Plan:
        _, process = running_worker(site.host, site.job, site.rank, site.host_id)
        return of_process(process)


class Kill(_OfRank):
    name = "kill"
    about = "SIGKILL to the process of a rank"
    causes = ("worker_killed",)

    def inject(self, plan: Plan) -> None:
        signal_planned(plan, signal.SIGKILL)


class Hang(_OfRank):
    name = "hang"
    about = "SIGSTOP to the process of a rank: it lives, and does nothing"
    lasts_s = 120.0
    causes = ("rank_stalled",)

    def inject(self, plan: Plan) -> None:
        signal_planned(plan, signal.SIGSTOP)

    def undo(self, plan: Plan) -> None:
        send_to(plan, signal.SIGCONT)


class _Slow(RealFault):
    """Runs only part of the time: stopped and continued, again and again."""

    options = (
        Option("share", 0.5, "part of the time for which it runs"),
        Option("period_s", 0.2, "seconds from one stop to the next"),
    )
    lasts_s = 30.0

    def inject(self, plan: Plan) -> None:
        if look_at(int(plan["pid"])) is None:
            signal_planned(plan, signal.SIGCONT)  # it has ended: say so

    def hold(self, plan: Plan, over: threading.Event) -> None:
        runs_s = float(plan["share"]) * float(plan["period_s"])
        while send_to(plan, signal.SIGSTOP):
            ended = over.wait(float(plan["period_s"]) - runs_s)
            send_to(plan, signal.SIGCONT)
            if ended or over.wait(runs_s):
                return
        over.wait()

    def undo(self, plan: Plan) -> None:
        send_to(plan, signal.SIGCONT)

    def with_duty(self, plan: Plan, site: FaultSite) -> Plan:
        if not site.number("period_s") > 0:
            raise UsageError("period_s must be above 0.", hint="for example period_s=0.2")
        return plan | {"share": min(1.0, max(0.01, site.number("share"))), "period_s": site.number("period_s")}


class Slow(_Slow):
    name = "slow"
    about = "a rank that runs half of the time: SIGSTOP and SIGCONT, five times a second"
    target = FaultTarget.RANK

    def plan(self, site: FaultSite) -> Plan:
        _, process = running_worker(site.host, site.job, site.rank, site.host_id)
        return self.with_duty(of_process(process), site)


def _engine(site: FaultSite) -> LiveProcess:
    process = site.host.engine()
    if process is None:
        raise NotFound(f"The checkpoint engine of {site.host_id} does not run.", hint="wait until its daemon starts it")
    return process


class _OfEngine(RealFault):
    target = FaultTarget.HOST

    def plan(self, site: FaultSite) -> Plan:
        return of_process(_engine(site))


class EngineKill(_OfEngine):
    name = "engine-kill"
    about = "SIGKILL to a host's checkpoint engine"

    def inject(self, plan: Plan) -> None:
        signal_planned(plan, signal.SIGKILL)


class EnginePause(_OfEngine):
    name = "engine-pause"
    about = "SIGSTOP to a host's checkpoint engine: no save of its ranks is completed"
    lasts_s = 20.0

    def inject(self, plan: Plan) -> None:
        signal_planned(plan, signal.SIGSTOP)

    def undo(self, plan: Plan) -> None:
        send_to(plan, signal.SIGCONT)


class EngineSlow(_Slow):
    name = "engine-slow"
    about = "a checkpoint engine that runs part of the time: saves take as long as with a slow disk"
    target = FaultTarget.HOST
    options = (
        Option("share", 0.1, "part of the time for which it runs"),
        Option("period_s", 0.5, "seconds from one stop to the next"),
    )

    def plan(self, site: FaultSite) -> Plan:
        return self.with_duty(of_process(_engine(site)), site)


class DaemonPause(RealFault):
    name = "daemon-pause"
    about = "SIGSTOP to a host's daemon: it reports nothing, and its ranks train on"
    target = FaultTarget.HOST
    lasts_s = 15.0

    def plan(self, site: FaultSite) -> Plan:
        daemon = site.host.daemon()
        if daemon is None:
            raise NotFound(f"The daemon of {site.host_id} does not run.", hint="start it, then try again")
        return of_process(daemon)

    def inject(self, plan: Plan) -> None:
        signal_planned(plan, signal.SIGSTOP)

    def undo(self, plan: Plan) -> None:
        send_to(plan, signal.SIGCONT)
