"""What the policy says in a test is kept in a file beside the test: `reasons/test_NAME.txt` in the test's folder.

The checked `decide` and `advance` note what users would read. A test fails if it hears what its file does not hold, or
does not hear what its section holds; `make goldens` writes the files anew. A section holds only what no section above
it holds, so that a changed sentence is one line of a diff. Tests by Hypothesis are not noted.

The hooks are for a conftest to import.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.actuator.ports import PlaybookStep
from services.controller.round.view import Outcome, View

FOLDER = "reasons"
WRITES = os.environ.get("FLYBALL_GOLDENS") == "write"
HINT = "Read what changed. If it should be so, run `make goldens`."

Said = dict[tuple[str, str], None]  # who says it (a rule, or what has the message), and the words; in order
Sections = dict[str, Said]  # by test

_now: list[Said] = []  # of the test that runs
_heard: dict[Path, Sections] = defaultdict(dict)
_tests: dict[Path, dict[str, set[str]]] = defaultdict(dict)  # of each file, in its order: the ids of each test
_passed: dict[Path, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))


def note_outcome(view: View, outcome: Outcome) -> None:
    """Note the reasons, then the messages that are new and in no reason. Of decisions alike but for numbers, the
    first."""
    alike: set[tuple[str, str]] = set()
    for decision in outcome.decisions:
        if (shape := (decision.rule, re.sub(r"\d", "", decision.reason))) not in alike:
            note(decision.rule, decision.reason)
            alike.add(shape)
    reasons = "\n".join(decision.reason for decision in outcome.decisions)
    known = {message for part in (view.jobs, view.hosts, view.incidents) for message in map(_message, part)}
    for name, part in (
        ("a job's message", outcome.jobs),
        ("a host's reason", outcome.hosts),
        ("an incident's message", outcome.incidents),
        ("an answer to an order", outcome.orders),
    ):
        for message in map(_message, part):
            if message not in known and message.rstrip(" .") not in reasons:
                note(name, message)
    waited_for = {incident.holding_for for incident in view.incidents} | {""}
    for incident in outcome.incidents:
        if incident.holding_for not in waited_for:
            note("an incident waits for", incident.holding_for)


def note_step(step: PlaybookStep) -> None:
    if step.message:
        note(f"an action in phase {step.phase}, {step.state.value}", step.message)


def _message(thing: Any) -> str:  # noqa: ANN401 - a host has a reason, all else a message
    return str(getattr(thing, "message", None) or getattr(thing, "reason", ""))


def note(who: str, words: str) -> None:
    """Of a test that asks the code below the policy, too."""
    if _now:
        _now[0][who, words.replace("\n", r"\n").rstrip()] = None


def note_evidence(who: str, evidence: Mapping[str, object]) -> None:
    note(f"the evidence of {who}", json.dumps(dict(evidence), sort_keys=True))


def golden_path(tests: Path) -> Path:
    return tests.parent / FOLDER / f"{tests.stem}.txt"


@functools.cache
def sections(golden: Path) -> Sections:
    found: Sections = {}
    test = who = ""
    for line in golden.read_text().split("\n") if golden.exists() else ():
        if line.startswith("    "):
            found.setdefault(test, {})[who, line[4:]] = None
        elif line.startswith("  "):
            who = line[2:]
        elif line:
            found[test := line] = {}
    return found


def written(heard: Sections) -> str:
    above: set[tuple[str, str]] = set()
    parts: list[str] = []
    for test, said in heard.items():
        by_who: dict[str, list[str]] = defaultdict(list)
        for who, words in said:
            if (who, words) not in above:
                by_who[who].append(f"    {words}")
        above.update(said)
        if by_who:
            parts.append("\n".join([test, *(line for who, words in by_who.items() for line in (f"  {who}", *words))]))
    return "\n\n".join(parts) + "\n" if parts else ""


def difference(golden: Sections, test: str, said: Said, *, is_whole: bool) -> str:
    """Of what one test says and what the file holds. `is_whole`: the test has said all that it says."""
    known = {pair for section in golden.values() for pair in section}
    more = [pair for pair in said if pair not in known]
    less = [pair for pair in golden.get(test, ()) if pair not in said] if is_whole else []
    lines = [f"{sign} {who}: {words}" for sign, pairs in (("-", less), ("+", more)) for who, words in pairs]
    return "\n".join(lines[:6] + ([f"and {len(lines) - 6} more"] if len(lines) > 6 else []))


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2].partition("[")[0]


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Iterator[Any]:
    """Also of a run of some of a test's parameters: all of them are made first."""
    made = yield
    for item in made if isinstance(made, list) else ():
        if isinstance(item, pytest.Function):
            _tests[collector.path].setdefault(_name(item), set()).add(item.nodeid)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if hasattr(getattr(item, "obj", None), "hypothesis"):
        _passed[item.path][_name(item)].add(item.nodeid)
        return (yield)
    name, heard = _name(item), _heard[item.path]
    _now[:] = [{}]
    try:
        yield
    finally:
        (said,) = _now
        _now.clear()
    heard[name] = heard.get(name, {}) | said
    _passed[item.path][name].add(item.nodeid)
    if not WRITES:
        golden = golden_path(item.path)
        is_whole = _passed[item.path][name] == _tests[item.path][name]
        new = difference(sections(golden), name, heard[name] if is_whole else said, is_whole=is_whole)
        if new:
            pytest.fail(f"{golden.relative_to(item.config.rootpath)} differs:\n{new}\n{HINT}", pytrace=False)


def pytest_sessionfinish() -> None:
    """Write the files whose tests all passed, and remove those whose tests are gone."""
    for tests, heard in _heard.items() if WRITES else ():
        golden = golden_path(tests)
        text = written({name: heard[name] for name in _tests[tests] if name in heard})
        if _passed[tests] != _tests[tests] and (text or golden.exists()):
            print(f"\nNot written, since not all of its tests ran and passed: {golden}")
        elif text:
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(text)
        else:
            golden.unlink(missing_ok=True)
        for other in golden.parent.glob("*.txt"):
            if not golden.parent.with_name(f"{other.stem}.py").exists():
                other.unlink()
