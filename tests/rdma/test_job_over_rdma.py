"""A training job on three machines, with a supervisor: two hosts and a spare. One host's machine loses its power.

    make test-rdma-job

The supervisor runs beside the first host. `examples/train_gpt.py` is trained as it is, on one rank per host. What the
lost host had in memory is gone with it; its rank trains on from the copy on the other host, which the spare reads over
RDMA. The hosts require RDMA (`transport = rdma`): a byte of a shard that cannot go over it does not go at all.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from other_host import OtherMachine, Process, addresses

from flyball.cli.reach.client import ApiClient
from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.cluster import JobSpec
from flyball.contracts.decisions import DecisionKind, IncidentState
from flyball.contracts.errors import FlyballError
from flyball.contracts.events import Event, EventKind, per_rank

pytestmark = pytest.mark.skipif(len(addresses()) < 3, reason="it takes three machines: make test-rdma-job")

ROOT = Path(__file__).resolve().parents[2]
HOST_PROGRAM = Path(__file__).with_name("patient_host.py")
JOB = "gpt"
TOKEN = "a-token-for-this-test-only"
PORT = 7370
FOLDER = "/run"  # of the supervisor and of each host
MODEL = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "24", "--batch-size", "1", "--seed", "7")
STEPS_BEFORE, STEPS_AFTER = 5, 3
START_DEADLINE_S = 1200.0  # an emulated processor imports torch for a minute or two
RECOVERY_DEADLINE_S = 1200.0
SHOWN_EVERY_S = 60.0
LARGEST_PACKET_BYTES = 4096
# On emulated processors a late report is no silent host.
PATIENT_SUPERVISOR = {
    "FLYBALL_DETECTOR__SILENCE__MIN_DEADLINE_S": "10",
    "FLYBALL_DETECTOR__STALLS__UNSETTLED_S": "600",
    "FLYBALL_POLICY__ACTION_DEADLINE_S": "300",
    "FLYBALL_POLICY__VERIFY_DEADLINE_S": "600",
    "FLYBALL_POLICY__SPARE_FRESH_S": "60",
    "FLYBALL_START_TIMEOUT_S": "300",
    "FLYBALL_LEASE_TTL_S": "30",
}
HOST = {
    "FLYBALL_CKPT_TRANSPORT": "rdma",
    "FLYBALL_CKPT_HANDSHAKE_TIMEOUT_S": "60",
    "FLYBALL_CKPT_PING_TIMEOUT_S": "20",
    "FLYBALL_CKPT_REPLICATE_TIMEOUT_S": "60",
}


class StackOnMachines:
    """A supervisor on this machine, and a host on each."""

    def __init__(self, here: OtherMachine, others: list[OtherMachine]) -> None:
        self.machines = {f"host-{letter}": machine for letter, machine in zip("abc", (here, *others), strict=True)}
        self._url = f"http://{here.own_address}:{PORT}"
        up = ("up", "--host", here.own_address, "--port", str(PORT), "--state-dir", f"{FOLDER}/supervisor")
        command = (sys.executable, "-m", "flyball.cli.main", *up)
        self._supervisor = here.start(*command, env={"FLYBALL_TOKEN": TOKEN, **PATIENT_SUPERVISOR})
        self._daemons: dict[str, Process] = {}
        self.client = ApiClient(self._url, TOKEN)
        self.until("the supervisor answers", lambda: self.client.items("/v1/hosts") is not None, START_DEADLINE_S)
        for name, machine in self.machines.items():
            machine.run("sh", "-c", f"umask 077; echo {TOKEN} > {FOLDER}/{name}.token")
            about = ("--host-id", name, "--address", machine.address, "--state-dir", f"{FOLDER}/{name}")
            known = ("--supervisor", self._url, "--token-file", f"{FOLDER}/{name}.token", "--warm-nproc", "1")
            self._daemons[name] = machine.start(sys.executable, str(HOST_PROGRAM), *about, *known, env=HOST)

    def lose_power_of(self, host_id: str) -> None:
        del self._daemons[host_id]
        self.machines.pop(host_id).lose_power()

    def until(self, what: str, condition: Callable[[], object], deadline_s: float) -> None:
        deadline, shown = time.monotonic() + deadline_s, time.monotonic()
        while True:
            trouble = ""
            try:
                if condition():
                    print(f"{time.monotonic():.0f} s: {what}", flush=True)
                    return
            except FlyballError as error:
                trouble = error.message
            assert time.monotonic() < deadline, f"not in {deadline_s:.0f} s: {what}. {trouble}\n{self.outputs()}"
            if time.monotonic() - shown > SHOWN_EVERY_S:
                shown = time.monotonic()
                print(f"{shown:.0f} s: not yet {what} {trouble} {self.state()}", flush=True)
            time.sleep(0.5)

    def state(self) -> str:
        """For whoever waits."""
        try:
            hosts = {name: host["state"] for name, host in self.hosts().items()}
            job = self.client.get(f"/v1/jobs/{JOB}")
        except FlyballError as error:
            return error.message
        ranks = [(rank["rank"], rank["host_id"], rank.get("phase"), rank["step"]) for rank in job["ranks"]]
        return f"{hosts} {job['state']} {job.get('message', '')} {ranks}"

    def outputs(self) -> str:
        """Of the supervisor, the daemons and the workers."""
        logs = [process.output()[-3000:] for process in (self._supervisor, *self._daemons.values())]
        for name, machine in self.machines.items():
            find = f"find {FOLDER}/{name} -name '*rank*' -type f | xargs -r tail -n 40"
            logs.append(f"{name}\n" + machine.run("sh", "-c", find)[-3000:])
        return "\n".join(logs)

    def hosts(self) -> dict[str, dict[str, Any]]:
        return {str(host["host_id"]): host for host in self.client.items("/v1/hosts")}

    def ranks(self) -> dict[int, dict[str, Any]]:
        return {int(rank["rank"]): rank for rank in self.client.get(f"/v1/jobs/{JOB}")["ranks"]}

    def step(self) -> int:
        """That the slowest rank has reached; -1 before."""
        ranks = self.ranks().values()
        return min((int(rank["step"]) for rank in ranks), default=-1)

    def events(self) -> list[Event]:
        found: list[Event] = []
        after = 0
        while page := self.client.get("/v1/events", after=after, limit=1000):
            for item in page["items"]:
                found += per_rank(wire.convert(item["event"], Event))
            after = page["next_after"]
            if len(page["items"]) < 1000:
                return found
        return found

    def packets(self, host_id: str, name: str) -> int:
        path = f"/sys/class/infiniband/rxe0/ports/1/hw_counters/{name}"
        return int(self.machines[host_id].run("cat", path))


@pytest.fixture
def stack() -> Iterator[StackOnMachines]:
    with ExitStack() as stack:
        here = stack.enter_context(OtherMachine.of_one_host())
        others = [stack.enter_context(machine) for machine in OtherMachine.all_of_this_run()]
        yield StackOnMachines(here, others)


def test_a_machine_that_loses_its_power_is_replaced_and_its_rank_trains_on_from_a_peers_copy_read_over_rdma(
    stack: StackOnMachines, tmp_path: Path
) -> None:
    ready = lambda: sum(bool(host["engine_address"]) for host in stack.hosts().values()) == 3  # noqa: E731
    stack.until("three hosts have joined", ready, START_DEADLINE_S)
    spec = JobSpec(
        job=JOB,
        argv=(str(ROOT / "examples" / "train_gpt.py"), "--steps", "1000000", *MODEL, "--losses-dir", str(tmp_path)),
        workdir=str(ROOT),
        nnodes=2,
        checkpoint=CheckpointSpec(every_steps=1, replicas=1),
        hosts=(),
    )
    stack.client.post("/v1/jobs", spec)
    stack.until("training", lambda: stack.step() >= STEPS_BEFORE, START_DEADLINE_S)

    places = {rank: str(row["host_id"]) for rank, row in stack.ranks().items()}
    lost_rank, lost = next((rank, host) for rank, host in places.items() if host != "host-a")
    (holder,) = set(places.values()) - {lost}
    (spare,) = set(stack.machines) - set(places.values())
    assert stack.hosts()[holder]["transports"][0]["transport"] == "rdma"
    before = stack.packets(spare, "rcvd_pkts")
    step_before = stack.step()
    began = time.monotonic()
    stack.lose_power_of(lost)

    def migrated() -> bool:
        return spare in {str(row["host_id"]) for row in stack.ranks().values()}

    stack.until(f"{lost}, which had rank {lost_rank}, is replaced by {spare}", migrated, RECOVERY_DEADLINE_S)
    decided_s = time.monotonic() - began
    stack.until(
        f"training goes on past step {step_before}",
        lambda: migrated() and stack.step() >= step_before + STEPS_AFTER,
        RECOVERY_DEADLINE_S,
    )
    trained_s = time.monotonic() - began

    decisions = [d for d in stack.client.items("/v1/decisions") if d["kind"] == DecisionKind.MIGRATE_TO_SPARE]
    assert len(decisions) == 1, decisions
    restored = {
        event.rank: event
        for event in stack.events()
        if event.kind is EventKind.RESTORED and event.rank == lost_rank
    }[lost_rank].data  # fmt: skip
    size_bytes = int(str(restored["size_bytes"]))
    assert (restored["source_tier"], restored["source_host"]) == (Tier.PEER.value, holder)
    assert restored["transport"] == "rdma"
    restored_step = int(str(restored["step"]))
    assert restored_step > 0
    stack.until("training goes on past it", lambda: stack.step() > restored_step, RECOVERY_DEADLINE_S)
    received = stack.packets(spare, "rcvd_pkts") - before
    assert received >= size_bytes / LARGEST_PACKET_BYTES
    assert {t["peer"]: t["transport"] for t in stack.hosts()[spare]["transports"]} == {holder: "rdma"}

    (incident,) = stack.client.items("/v1/incidents", job=JOB)
    assert incident["restored_step"] == restored["step"]
    assert IncidentState(incident["state"]) in (IncidentState.VERIFYING, IncidentState.RESOLVED)
    losses: dict[tuple[str, int], set[str]] = defaultdict(set)
    for file in tmp_path.glob("rank*.txt"):
        for line in file.read_text().rpartition("\n")[0].splitlines():
            step, loss, _ = line.split()
            losses[file.name, int(step)].add(loss)
    assert all(len(values) == 1 for values in losses.values()), "a step that was computed again had another loss"
    print(
        f"rank {lost_rank} of {lost} went on on {spare} from step {restored['step']}, {size_bytes} bytes of which "
        f"{holder} had the copy; {received} packets arrived at {spare}. Decided after {decided_s:.0f} s, past step "
        f"{step_before} after {trained_s:.0f} s. {decisions[0]['reason']}"
    )
