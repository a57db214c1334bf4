"""The faults of a simulated cluster, drawn from a seed. Pure."""

from __future__ import annotations

from enum import StrEnum
from random import Random

import msgspec


class FaultKind(StrEnum):
    WORKER_KILLED = "worker_killed"
    WORKER_FAILED = "worker_failed"  # with an exception
    WORKER_HANGS = "worker_hangs"
    DAEMON_KILLED = "daemon_killed"  # and restarted
    ENGINE_AWAY = "engine_away"  # its slots stay, but nobody can list them
    HOST_DOWN = "host_down"  # and up again, with empty memory
    HOST_RESTARTS = "host_restarts"  # with empty memory, before its silence is noticed
    HOST_CUT_OFF = "host_cut_off"  # from everything
    HOST_CUT_FROM_SENSORS = "host_cut_from_sensors"  # in one direction
    HOST_CUT_FROM_ACTUATORS = "host_cut_from_actuators"
    HOSTS_CUT_FROM_EACH_OTHER = "hosts_cut_from_each_other"
    ALL_HOSTS_PAUSED = "all_hosts_paused"  # all of the job's, like a VM snapshot; memory stays
    ALL_HOSTS_CUT_FROM_SUPERVISOR = "all_hosts_cut_from_supervisor"  # all of the job's, which trains on
    PREEMPTED = "preempted"  # a notice; then the host goes, and returns much later
    LOSSY_NETWORK = "lossy_network"
    SLOW_NETWORK = "slow_network"
    SENSOR_KILLED = "sensor_killed"
    CONTROLLER_KILLED = "controller_killed"
    ACTUATOR_KILLED = "actuator_killed"
    SENSOR_STOPPED = "sensor_stopped"  # SIGSTOP, SIGCONT
    CONTROLLER_STOPPED = "controller_stopped"
    CONTROLLER_STOPPED_AT_COMMIT = "controller_stopped_at_commit"  # longer than its lease: then two lead
    ACTUATOR_STOPPED = "actuator_stopped"
    BUS_FLUSHED = "bus_flushed"
    BUS_AWAY = "bus_away"
    DATABASE_AWAY = "database_away"
    DATABASE_OLDER = "database_older"  # when it returns, it is a backup from the fault's beginning
    DATABASE_LOST = "database_lost"  # an empty one takes its place
    HOST_CLOCK_JUMPS = "host_clock_jumps"
    CONTROLLER_CLOCK_JUMPS = "controller_clock_jumps"
    WORKERS_KILLED_TOGETHER = "workers_killed_together"  # on two hosts
    NOTICE_IN_VAIN = "notice_in_vain"  # the host is not taken away, and there is no spare
    DRAIN_IN_VAIN = "drain_in_vain"  # the spares are gone, but not noticed yet
    PORTS_TAKEN = "ports_taken"  # when the next few generations start
    SHARE_AWAY = "share_away"  # the script is missing on all hosts when a worker is killed
    SPARE_LACKS_FILES = "spare_lacks_files"  # when another host goes down
    HOST_DISK_FULL = "host_disk_full"  # its daemon stops and saves, but starts nothing
    HOST_FLOODS = "host_floods"  # with more signals than a host may send
    HOST_KEEPS_NO_SAVE = "host_keeps_no_save"  # every save of its ranks fails, and so the world's
    HOST_WARNS = "host_warns"  # a condition for which ranks should leave
    HOST_BROKEN = "host_broken"  # a condition with which no rank can train, by its daemon
    ALL_HOSTS_LOST = "all_hosts_lost"  # all of the job's, with their memory
    STORE_AWAY = "store_away"  # the persistent tier answers nobody
    HOST_CUT_FROM_STORE = "host_cut_from_store"


_LASTS_S = {
    FaultKind.DAEMON_KILLED: (0.5, 20.0),
    FaultKind.ENGINE_AWAY: (0.5, 8.0),
    FaultKind.HOST_DOWN: (20.0, 90.0),
    FaultKind.HOST_RESTARTS: (0.1, 2.0),
    FaultKind.HOST_CUT_OFF: (2.0, 60.0),
    FaultKind.HOST_CUT_FROM_SENSORS: (2.0, 60.0),
    FaultKind.HOST_CUT_FROM_ACTUATORS: (2.0, 40.0),
    FaultKind.HOSTS_CUT_FROM_EACH_OTHER: (2.0, 40.0),
    FaultKind.ALL_HOSTS_PAUSED: (5.0, 90.0),
    FaultKind.ALL_HOSTS_CUT_FROM_SUPERVISOR: (5.0, 90.0),
    FaultKind.PREEMPTED: (15.0, 60.0),  # from the notice to the loss
    FaultKind.LOSSY_NETWORK: (10.0, 60.0),
    FaultKind.SLOW_NETWORK: (10.0, 60.0),
    FaultKind.SENSOR_KILLED: (0.5, 15.0),
    FaultKind.CONTROLLER_KILLED: (0.5, 15.0),
    FaultKind.ACTUATOR_KILLED: (0.5, 15.0),
    FaultKind.SENSOR_STOPPED: (1.0, 20.0),
    FaultKind.CONTROLLER_STOPPED: (1.0, 20.0),
    FaultKind.CONTROLLER_STOPPED_AT_COMMIT: (3.5, 12.0),
    FaultKind.ACTUATOR_STOPPED: (1.0, 20.0),
    FaultKind.BUS_AWAY: (1.0, 30.0),
    FaultKind.DATABASE_AWAY: (1.0, 60.0),
    FaultKind.DATABASE_OLDER: (0.5, 90.0),
    FaultKind.HOST_CLOCK_JUMPS: (5.0, 40.0),
    FaultKind.CONTROLLER_CLOCK_JUMPS: (5.0, 40.0),
    FaultKind.NOTICE_IN_VAIN: (10.0, 100.0),
    FaultKind.DRAIN_IN_VAIN: (20.0, 200.0),
    FaultKind.SHARE_AWAY: (2.0, 30.0),
    FaultKind.SPARE_LACKS_FILES: (30.0, 150.0),
    FaultKind.HOST_DISK_FULL: (5.0, 120.0),
    FaultKind.HOST_FLOODS: (4.0, 8.0),
    FaultKind.HOST_KEEPS_NO_SAVE: (20.0, 150.0),
    FaultKind.HOST_WARNS: (1.0, 120.0),
    FaultKind.HOST_BROKEN: (1.0, 120.0),
    FaultKind.ALL_HOSTS_LOST: (5.0, 60.0),
    FaultKind.STORE_AWAY: (2.0, 90.0),
    FaultKind.HOST_CUT_FROM_STORE: (2.0, 90.0),
}
# The interesting ones: every run has at least one.
_FAILURES = (
    FaultKind.WORKER_KILLED,
    FaultKind.WORKER_FAILED,
    FaultKind.WORKER_HANGS,
    FaultKind.HOST_DOWN,
    FaultKind.HOST_RESTARTS,
    FaultKind.HOST_CUT_OFF,
    FaultKind.ALL_HOSTS_PAUSED,
    FaultKind.ALL_HOSTS_CUT_FROM_SUPERVISOR,
    FaultKind.PREEMPTED,
    FaultKind.WORKERS_KILLED_TOGETHER,
    FaultKind.NOTICE_IN_VAIN,
    FaultKind.DRAIN_IN_VAIN,
    FaultKind.PORTS_TAKEN,
    FaultKind.SHARE_AWAY,
    FaultKind.SPARE_LACKS_FILES,
    FaultKind.HOST_WARNS,
    FaultKind.HOST_BROKEN,
    FaultKind.ALL_HOSTS_LOST,
)


class Fault(msgspec.Struct, frozen=True):
    """`pick` and `size`, from 0 to 1, choose the target and extent when the fault begins."""

    kind: FaultKind
    after_s: float  # from the start of the run
    lasts_s: float  # 0.0: momentary
    pick: float
    size: float

    def __str__(self) -> str:
        return f"{self.kind.value} for {self.lasts_s:.1f} s" if self.lasts_s else self.kind.value


def draw(rng: Random, *, count: int, first_after_s: float, within_s: float) -> tuple[Fault, ...]:
    """Draw `count` faults, in order of time.

    More than half begin during the previous fault or just after it: a second fault during a recovery is what finds
    bugs.
    """
    kinds = [rng.choice(_FAILURES), *(rng.choice(tuple(FaultKind)) for _ in range(count - 1))]
    rng.shuffle(kinds)
    faults: list[Fault] = []
    for kind in kinds:
        shortest_s, longest_s = _LASTS_S.get(kind, (0.0, 0.0))
        after_s = first_after_s + rng.uniform(0.0, within_s)
        if faults and rng.random() < 0.6:
            after_s = faults[-1].after_s + rng.uniform(0.0, 12.0)
        lasts_s = rng.uniform(shortest_s, longest_s)
        faults.append(Fault(kind, round(after_s, 3), round(lasts_s, 3), rng.random(), rng.random()))
    return tuple(sorted(faults, key=lambda fault: fault.after_s))
