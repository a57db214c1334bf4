"""Measures the control plane's capacity: one sensor, controller, actuator, Redis, MariaDB and load generator, all on
this machine.

    python benchmarks/control_plane.py --json              one JSON object on stdout, progress on stderr
    python benchmarks/control_plane.py --quick             2,500 hosts for 8 s: continuous integration runs this
    python benchmarks/control_plane.py --hosts 5000 --seconds 30 --bus embedded

A report is one HTTP request of one host with its token: eight ranks, the step that each completed in the last second,
eight copies. The phases:

1. Idle: one host's worker fails repeatedly; nothing else happens.
2. Flood: 256 hosts report as fast as they are answered. They alternate three times between a bare endpoint that only
   decodes, and the sensor. A first, shorter flood of each is not counted: the hosts join, and the sensor reads their
   placement. Two figures compare the sensor with the endpoint. A noisy machine slows both sides alike.
   - `floor_ratio`: reports per second over the endpoint's; the median of the three ratios. Both share this machine with
     the load generator, which on two cores limits the endpoint and not the sensor.
   - `floor_cpu_ratio`: CPU time per report of the endpoint over that of the sensor's process. The load generator does
     not limit it. It counts all threads of the sensor, those that store state included.
3. Paced: all hosts report once a second, each on its own connection. They join at once, without ranks, and jobs are
   submitted meanwhile: `start_ms` is the time to the command that starts a worker. 15 s later all their jobs run, and
   they have ranks; after 15 s more the run counts, while some other hosts fail repeatedly.
4. Batches: all hosts over 256 connections, 16 requests at once; reported separately.

Only the hosts of the probe fail. An incident of any other host or job is false, and the run fails. `stored_ms` is how
long state waited for the database: bounds of a histogram's buckets. A median needs 50 samples, a p99 needs 1,000; with
fewer it is missing. `other_cores` is what processes that are not of the run used while it counted.

The benchmark creates and removes its own database and Redis server. It expects MariaDB or MySQL at 127.0.0.1:3306
(root, no password), unless --database is given. Run it on an otherwise idle machine.

Exit codes: 0 for success, 1 if reports were dropped, an incident was false, no decision was made under load, or no job
started; 2 for wrong arguments, 7 for too little memory or too few open files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import msgspec  # noqa: E402 - the lines above make the rest importable
import psutil  # noqa: E402
import uvloop  # noqa: E402
from control_plane_bench import fleet, machine, stack  # noqa: E402
from control_plane_bench.figures import histogram_quantiles, quantiles_ms  # noqa: E402
from control_plane_bench.floor import running_floor  # noqa: E402
from control_plane_bench.load import LoadResult, joined, run_flood, run_paced  # noqa: E402
from control_plane_bench.probe import Order, Samples  # noqa: E402

from flyball.contracts.wire import decode  # noqa: E402

BATCH = 16  # reports sent together on a connection, as a relay of many hosts would
FLOOD_PAIRS = 3  # runs each of bare endpoint and sensor, alternating
FLOOD_WARM_UP_S = 1.5  # a sensor reads placements every second
PROBED_AT_ONCE = 8  # repeatedly failing hosts: under load, an incident stays open for seconds
SUBMITTED_AFTER_S = 1.0  # since the hosts began to join
PROBES = "probe-"  # what names of jobs and hosts that do fail begin with
IDLE_S = 400.0  # for the failures without load, at most
FILES_BESIDE_HOSTS = 500
BYTES_PER_HOST = 150_000  # in the sensor, the load generator, the controller and the database together
BASE_BYTES = 1 << 30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--hosts", type=int, help="number of hosts, each with 8 ranks and a connection (10000)")
    parser.add_argument("--seconds", type=float, help="duration of the paced phase (60)")
    parser.add_argument("--flood-seconds", type=float, help="duration of the flood (10)")
    parser.add_argument("--connections", type=int, default=256, help="connections in the flood (256)")
    parser.add_argument("--hosts-per-job", type=int, default=1250, help="hosts per job (1250: 10,000 ranks)")
    parser.add_argument("--failures", type=int, help="failures to measure, idle and loaded each (1000)")
    parser.add_argument("--warm-up-seconds", type=float, help="of joining, and of starting (15)")
    parser.add_argument("--beside", type=int, default=0, help="processes to keep busy beside the paced phase (0)")
    parser.add_argument("--bus", choices=("redis", "embedded"), default="redis", help="bus for the signals (redis)")
    parser.add_argument("--database", default="", help="URL of an empty database to use instead of a new one")
    parser.add_argument("--quick", action="store_true", help="2,500 hosts, 8 s, 1.5 s of flood, 8 failures")
    options = parser.parse_args()
    for name, whole, quick in (
        ("hosts", 10_000, 2_500),
        ("seconds", 60, 8),
        ("flood_seconds", 10, 1.5),
        ("failures", 1_000, 8),
        ("warm_up_seconds", 15, 6),
    ):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole)
    if min(options.hosts, options.connections, options.hosts_per_job, options.failures) < 1 or options.seconds < 1:
        parser.error("--hosts, --connections, --hosts-per-job, --failures and --seconds must be at least 1")
    options.connections = min(options.connections, options.hosts)
    return options


def main() -> int:
    options = parse()
    problem = shortage(options.hosts)
    if problem:
        print(f"control_plane: {problem}", file=sys.stderr)
        return 7
    before = machine.described()
    with (
        tempfile.TemporaryDirectory(prefix="fbcp-") as name,
        stack.running_stack(Path(name), bus=options.bus, database_url=options.database) as running,
    ):
        result = measure(options, running)
    result["detail"] |= {"machine_before": before, "machine_after": machine.described(), "bus": options.bus}
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            if key != "detail":
                print(f"{key:24} {value}")
    failures = result["detail"]["failures"]
    is_right = failures["loaded"] and failures["starts"] and not result["dropped"] + result["false_incidents"]
    return 0 if is_right else 1


def shortage(hosts: int) -> str:
    """Raise the limit on open files as far as allowed. Return what a run lacks, with the remedy; '' if nothing."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < hosts + FILES_BESIDE_HOSTS:
        needed = hosts + FILES_BESIDE_HOSTS
        return f"{most} open files are allowed, and {hosts} hosts need {needed}: raise `ulimit -Hn`, or give --hosts."
    needed, free = BASE_BYTES + hosts * BYTES_PER_HOST, psutil.virtual_memory().available
    if free < needed:
        return (
            f"{free >> 20} MiB of memory are free, and {hosts} hosts need {needed >> 20}: free some, or give --hosts."
        )
    return ""


def measure(options: argparse.Namespace, running: stack.Stack) -> dict[str, Any]:
    log("idle: one host fails repeatedly")
    idle = finish(start_probe(options, running, f"{PROBES}idle", seconds=IDLE_S))
    rss_before = {name: service.rss_bytes for name, service in running.services.items()}

    names = fleet.host_ids(options.hosts)
    few, many = names[: options.connections], names[options.connections :]
    groups = [few, *(many[n : n + options.hosts_per_job] for n in range(0, len(many), options.hosts_per_job))]
    hosts = [
        fleet.make_host(name, place * fleet.RANKS_PER_HOST, f"fleet-{number}", 1, running.secret, tag="a")
        for number, group in enumerate(groups)
        for place, name in enumerate(group)
    ]
    gc.collect()
    gc.freeze()

    flood_s = options.flood_seconds / FLOOD_PAIRS
    floors: list[LoadResult] = []
    floods: list[LoadResult] = []
    floor_cpu: Counter[str] = Counter()
    flood_cpu: Counter[str] = Counter()
    with running_floor() as endpoint:
        sides = (
            ("bare endpoint", endpoint.port, {"endpoint": endpoint}, floors, floor_cpu),
            ("sensor", running.sensor.port, running.services, floods, flood_cpu),
        )
        warm_up_s = min(flood_s, FLOOD_WARM_UP_S)
        uvloop.run(run_flood(running.sensor.port, hosts[: len(few)], len(few), warm_up_s, has_ranks=False))
        stack.add_jobs(running.database, groups[:1])
        for _, port, *_ in sides:
            uvloop.run(run_flood(port, hosts[: len(few)], options.connections, warm_up_s))
        for pair in range(1, FLOOD_PAIRS + 1):
            for title, port, services, results, spent_s in sides:
                log(f"flood {pair} of {FLOOD_PAIRS}: {options.connections} hosts, {flood_s:.1f} s, {title}")
                used = cpu(services)
                results.append(uvloop.run(run_flood(port, hosts[: len(few)], options.connections, flood_s)))
                spent_s.update(spent(services, used))
    flood, floor = joined(floods), joined(floors)
    ratios = [one.per_s / max(1.0, bare.per_s) for one, bare in zip(floods, floors, strict=True)]
    sensor_us = 1e6 * flood_cpu["sensor"] / max(1, flood.taken)
    endpoint_us = 1e6 * floor_cpu["endpoint"] / max(1, floor.taken)

    log(f"{options.hosts} hosts join, get their jobs, and report every second for {options.seconds:.0f} s")
    began_s, used, use = time.monotonic(), cpu(running.services), machine.Use.now()
    with machine.busy_beside(options.beside):
        loaded_probe = start_probe(
            options,
            running,
            f"{PROBES}loaded",
            seconds=options.seconds,
            hosts=min(PROBED_AT_ONCE, options.failures),
            delay_s=SUBMITTED_AFTER_S,
            fails_after_s=2 * options.warm_up_seconds,
        )
        paced = uvloop.run(
            run_paced(
                running.sensor.port,
                hosts,
                options.seconds,
                joining_s=options.warm_up_seconds,
                starting_s=options.warm_up_seconds,
                start=lambda: stack.add_jobs(
                    running.database, groups[1:], first=1, starts_in_s=options.warm_up_seconds
                ),
            )
        )
        loaded_probe.poll()  # if it has ended, its time counts as ours
        other_cores = machine.Use.now().others_since(use)
        false = stack.false_incidents(running.database, PROBES)  # at once: the fleet is silent from now on
        stored = running.sensor.metrics()
        paced_cpu = spent(running.services, used)
        paced_s = time.monotonic() - began_s
        rss_after = {name: service.rss_bytes for name, service in running.services.items()}
        loaded = finish(loaded_probe)
    log(f"all over {options.connections} connections, {BATCH} at once, for {options.flood_seconds:.0f} s")
    used = cpu(running.services)
    batches = uvloop.run(
        run_flood(running.sensor.port, hosts, options.connections, options.flood_seconds, at_once=BATCH)
    )
    batches_cpu = spent(running.services, used)
    metrics = running.sensor.metrics()
    unstored = metrics.get("flyball_reports_dropped_total", 0.0)

    decision, command = quantiles_ms(loaded.decision_s), quantiles_ms(loaded.command_s)
    decision_idle, command_idle = quantiles_ms(idle.decision_s), quantiles_ms(idle.command_s)
    grown = {name: (rss_after[name] - rss_before[name]) / (1 << 20) * 1000 / options.hosts for name in rss_after}
    return {
        "reports_per_s": round(flood.per_s),
        "floor_reports_per_s": round(floor.per_s),
        "floor_ratio": round(statistics.median(ratios), 3),
        "floor_cpu_ratio": round(endpoint_us / max(0.1, sensor_us), 3),
        "connections": paced.connections,
        "dropped": paced.dropped + flood.dropped + batches.dropped + int(unstored),
        "ingest_p99_ms": quantiles_ms(paced.latencies)["p99"],
        "decision_idle_p99_ms": decision_idle["p99"],
        "decision_loaded_p50_ms": decision["p50"],
        "decision_loaded_p99_ms": decision["p99"],
        "start_max_ms": quantiles_ms(loaded.start_s)["max"],
        "false_incidents": len(false),
        "other_cores": other_cores,
        "command_p99_ms": command["p99"],
        "mib_per_1000_hosts": round(grown["sensor"], 2),
        "detail": {
            "paced": shown(paced, paced_cpu),
            "flood": shown(flood, flood_cpu),
            "floor": shown(floor, floor_cpu),
            "floor_ratios": [round(ratio, 3) for ratio in ratios],
            f"batches_of_{BATCH}": shown(batches, batches_cpu),
            "first_refusal": paced.first_refusal or flood.first_refusal or batches.first_refusal,
            "publish_ms": histogram_quantiles(metrics, "flyball_publish_delay_seconds"),
            "decision_idle_ms": decision_idle,
            "decision_loaded_ms": decision,
            "command_idle_ms": command_idle,
            "command_loaded_ms": command,
            "start_ms": quantiles_ms(loaded.start_s),
            "stored_ms": {
                kind: histogram_quantiles(stored, "flyball_state_delay_seconds", f'kind="{kind}",')
                for kind in ("pressed", "steady")
            },
            "false_incidents": Counter(false).most_common(20),
            "failures": {
                "idle": len(idle.decision_s),
                "loaded": len(loaded.decision_s),
                "starts": len(loaded.start_s),
            },
            "mib_per_1000_hosts": {name: round(value, 2) for name, value in grown.items()},
            "cores_busy": {name: round(value / paced_s, 2) for name, value in paced_cpu.items()},
            "hosts": options.hosts,
            "ranks": options.hosts * fleet.RANKS_PER_HOST,
            "seconds": options.seconds,
        },
    }


def start_probe(
    options: argparse.Namespace,
    running: stack.Stack,
    name: str,
    *,
    seconds: float,
    hosts: int = 1,
    delay_s: float = 0.0,
    fails_after_s: float = 0.0,
) -> subprocess.Popen[bytes]:
    order = Order(
        name=name,
        sensor_port=running.sensor.port,
        actuator_port=running.services["actuator"].port,
        secret=running.secret,
        database_url=running.database.url.render_as_string(hide_password=False),
        failures=options.failures,
        seconds=seconds,
        hosts=hosts,
        delay_s=delay_s,
        fails_after_s=fails_after_s,
    )
    command = [sys.executable, "-m", "control_plane_bench.probe", msgspec.json.encode(order).decode()]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def finish(probe: subprocess.Popen[bytes]) -> Samples:
    """Return the probe's samples; none if it failed."""
    out, _ = probe.communicate(timeout=IDLE_S + 200.0)
    if probe.returncode != 0:
        log(f"the probe of failures exited with {probe.returncode}: its figures are missing")
        return Samples()
    return decode(out, Samples)


def shown(result: LoadResult, cpu_s: Mapping[str, float]) -> dict[str, Any]:
    return {
        "reports_per_s": round(result.per_s),
        "seconds": round(result.seconds, 2),
        "sent": result.sent,
        "taken": result.taken,
        "refused": result.refused,
        "lost": result.lost,
        "latency_ms": quantiles_ms(result.latencies),
        "joining_latency_ms": quantiles_ms(result.joining),
        "starting_latency_ms": quantiles_ms(result.starting),
        "generator_late_ms": quantiles_ms(result.lateness),
        "cpu_us_per_report": {name: round(1e6 * value / max(1, result.taken), 1) for name, value in cpu_s.items()},
    }


def cpu(services: Mapping[str, stack.Service]) -> dict[str, float]:
    """Return CPU seconds so far, by process; the load generator is this process."""
    own = sum(os.times()[:2])
    return {name: service.cpu_s for name, service in services.items()} | {"load": own}


def spent(services: Mapping[str, stack.Service], before: Mapping[str, float]) -> dict[str, float]:
    return {name: used - before[name] for name, used in cpu(services).items()}


def log(message: str) -> None:
    print(f"control_plane: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
