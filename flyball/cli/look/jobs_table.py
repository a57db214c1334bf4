"""How jobs are shown in tables."""

from __future__ import annotations

from typing import Any

from flyball.cli.show.times import ago, clock, lasted, rough, short

MANY_HOSTS = 8  # more are counted in words

JOB_COLUMNS = ("job", "state", "for", "started", "step", "loss", "last step", "a step", "restarts")
CALM = frozenset({"training", "ended"})  # what a job does that needs no sentence


def doing_word(job: dict[str, Any]) -> str:
    """The one word for how a job stands: what it does, or how it ended."""
    doing = job.get("doing") or {}
    return str(job["state"] if doing.get("kind") in (None, "ended") else doing["kind"])


def doing_note(job: dict[str, Any]) -> str:
    """The sentence about what a job does, if it does not simply train."""
    doing = job.get("doing") or {}
    return "" if doing.get("kind") in (None, *CALM) else str(doing["text"])


def _loss(job: dict[str, Any]) -> str | None:
    """The loss of the newest step of which it is known: a loss on a device is reported one step later."""
    loss = job.get("loss")
    return None if loss is None else f"{float(loss['value']):.4g}"


def loss_with_step(job: dict[str, Any]) -> str | None:
    """The same, with its step if that is not the newest."""
    value, step = _loss(job), (job.get("loss") or {}).get("step")
    return value if value is None or step == job.get("newest_step") else f"{value} (step {step})"


def _restarts(job: dict[str, Any]) -> str:
    """All restarts, and how much of the --max-restarts budget is used up since the job last made progress."""
    count, allowed = job.get("restart_count", 0), (job.get("spec") or {}).get("max_restarts")
    return f"{count} ({job.get('restarts_used', count)} of {allowed})" if count and allowed is not None else str(count)


def job_row(job: dict[str, Any], now: float) -> list[object]:
    since = job.get("since")
    return [
        job["job"],
        doing_word(job),
        rough(now - since if since else None),
        clock(job.get("started_at") or job["submitted_at"], now),
        known(job.get("newest_step")),
        _loss(job),
        ago(job.get("last_step_at"), now),
        short(job.get("step_s")) if not doing_note(job) else None,
        _restarts(job),
    ]


def outcome(job: dict[str, Any], now: float) -> str:
    """The job's end, or its state's message, for which the table has no room."""
    message = str(job.get("message") or "")
    hosts = job.get("hosts") or 0
    if ended_at := job.get("ended_at"):
        took = lasted(ended_at - job["submitted_at"])
        return f"ended at {clock(ended_at, now)} UTC, after {took}" + (f": {message}" if message else "")
    message = doing_note(job) or message
    return f"{job.get('world_size', '?')} ranks on {hosts} hosts; {message}" if hosts > MANY_HOSTS else message


def hosts_note(job: dict[str, Any], *, wide: bool) -> str:
    """Says that the job runs on fewer hosts than it asked for; with -o wide also that it may."""
    spec = job.get("spec") or {}
    hosts, asked, fewest = (int(spec.get(name) or 0) for name in ("nnodes", "max_nodes", "min_nodes"))
    if job.get("ended_at") or not fewest or not (asked > hosts or wide):
        return ""
    runs = f"runs on {hosts} of the {asked} hosts that it asked for" if asked > hosts else f"asked for {hosts} hosts"
    return f"{runs}; it may go on with {fewest}"


def save_note(job: dict[str, Any]) -> str:
    """Explains why the job saves less often than configured, if it does."""
    interval = job.get("save_interval")
    if job.get("ended_at") or not interval or interval["every_steps"] <= interval["wanted_steps"]:
        return ""
    save, step = short(interval["save_s"]), short(interval["step_s"])
    every, wanted = interval["every_steps"], interval["wanted_steps"]
    return (
        f"saves every {every} steps, not every {wanted}: a save takes {save} until all hosts and peers have it, "
        f"a step {step}"
    )


def known(value: object) -> object:
    """None for -1, which stands for unknown in steps and counts."""
    return None if value == -1 else value
