"""The seal of a start command: who can make it, what it covers, and what changes it not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.jobs.placements import make_placement

from flyball.contracts import wire
from flyball.contracts.checkpoints import LineageEntry, RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import HostRanks, JobSpec
from flyball.contracts.decisions import StartWorkers
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.identity import Fence
from flyball.contracts.reports.grant_seals import GrantSeal
from flyball.contracts.reports.standings import HeldJob, HostStanding, LastObeyed
from services.actuator.rules.host_parts import host_parts
from services.rules.grant_seals import GrantSeals, digest_of, whole_digest

SECRET = "a secret of the cluster"
SPEC = JobSpec("job", ("train.py", "--lr", "0.1"), "/work", nnodes=3, env={"B": "2", "A": "1"}, policy={"grow": False})
WHOLE = make_placement(
    {f"h{n}": (n,) for n in range(3)},
    generation=5,
    peers={f"h{n}": (f"h{(n + 1) % 3}",) for n in range(3)},
    lineage=(LineageEntry(2, 40), LineageEntry(5, None)),
    restore=RestorePlan(40, {str(n): (ShardSource(n, 2, Tier.MEMORY, f"h{n}", ""),) for n in range(3)}),
)
FENCE = Fence(9, 5)
SEALS = GrantSeals(SECRET)


def sealed(host_id: str, seals: GrantSeals = SEALS) -> HeldJob:
    """What the host holds after it obeyed, as it comes back over the wire."""
    body = StartWorkers(SPEC, host_parts(WHOLE)[host_id], GrantSeal(whole=whole_digest(WHOLE)))
    command = seals.sealed(host_id, body, FENCE)
    held = HeldJob(command.spec, command.placement, FENCE, (), seal=command.seal)
    return wire.decode(wire.encode(held), HeldJob)


@pytest.mark.parametrize("host_id", ["h0", "h1", "h2"])
def test_what_a_host_was_given_is_proved_by_its_seal(host_id: str) -> None:
    assert SEALS.proves(host_id, sealed(host_id))


def changed(held: HeldJob, fields: dict[str, Any]) -> HeldJob:
    spec = {name: value for name, value in fields.items() if name in JobSpec.__struct_fields__ and name != "job"}
    placement = {name: value for name, value in fields.items() if name not in spec}
    return msgspec.structs.replace(
        held,
        spec=msgspec.structs.replace(held.spec, **spec),
        placement=msgspec.structs.replace(held.placement, **placement),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"argv": ("sh", "-c", "id")},
        {"env": {"A": "1"}},
        {"workdir": "/tmp"},
        {"nnodes": 4},
        {"generation": 6},
        {"world_size": 4},
        {"hosts": (HostRanks("h0", "10.0.0.1", "", (0, 1)),)},
        {"lineage": (LineageEntry(5, None),)},
        {"master_port": 2},
        {"restore": None},
        {"run": "20261123-180000-000"},
        {"peers": {}},
    ],
)
def test_nothing_of_it_can_be_changed(fields: dict[str, Any]) -> None:
    assert not SEALS.proves("h0", changed(sealed("h0"), fields))


def test_a_seal_does_not_carry_a_second_job_of_its_name() -> None:
    held = sealed("h0")
    standing = HostStanding("h0", "i", 1.0, LastObeyed(), 0.0, (held,))
    assert SEALS.word_of(standing)[0] == ("job",)
    forged = changed(held, {"argv": ("sh", "-c", "id"), "generation": 6})
    both = msgspec.to_builtins(standing) | {"jobs": msgspec.to_builtins((held, forged))}
    with pytest.raises(InvalidMessage, match="told once"):
        wire.decode(msgspec.json.encode(both), HostStanding)


def test_it_is_of_one_host_one_fence_and_one_cluster() -> None:
    held = sealed("h0")
    assert not SEALS.proves("h1", held), "h1 has no such part"
    assert not SEALS.proves("h0", msgspec.structs.replace(held, fence=Fence(10, 5)))
    assert not SEALS.proves("h0", msgspec.structs.replace(held, seal=GrantSeal()))
    assert not GrantSeals("another secret of a cluster").proves("h0", held)
    other = msgspec.structs.replace(held.seal, whole=whole_digest(msgspec.structs.replace(WHOLE, master_port=2)))
    assert not SEALS.proves("h0", msgspec.structs.replace(held, seal=other))


def test_a_rotated_secret_still_proves_what_the_former_one_sealed() -> None:
    rotated = GrantSeals("the new secret of the cluster", [SECRET])
    assert rotated.proves("h0", sealed("h0"))
    assert rotated.proves("h0", sealed("h0", rotated)) and not SEALS.proves("h0", sealed("h0", rotated))
    assert not GrantSeals("the new secret of the cluster").proves("h0", sealed("h0")), "the rotation is finished"


def test_an_end_is_proved_by_the_seal_of_the_generation_that_the_host_had() -> None:
    seal = sealed("h1").seal

    def word(host_id: str, ended: dict[str, int], **seals: GrantSeal) -> dict[str, tuple[str, int]]:
        standing = HostStanding(host_id, "i", 1.0, LastObeyed(), 0.0, (), ended, end_seals=seals)
        return SEALS.word_of(standing)[1]

    assert word("h1", {"job": 5}, job=seal) == word("h1", {"job": 8}, job=seal) == {"job": ("", 5)}
    assert word("h1", {"job": 4}, job=seal) == {}
    assert word("h1", {"job": 5}) == word("h2", {"job": 5}, job=seal) == {}
    assert word("h1", {"other": 5}, other=seal) == {}
    assert word("h1", {"job": 5}, job=msgspec.structs.replace(seal, generation=6)) == {}


def test_a_field_that_a_later_release_adds_changes_no_seal() -> None:
    """Nor the order of fields: what counts is which of them have which value."""
    later = msgspec.defstruct(
        "Later", [("ranks", tuple[int, ...]), ("new", int, 7), ("host_id", str), ("old", str, "")], kw_only=True
    )
    earlier = msgspec.defstruct("Earlier", [("host_id", str), ("ranks", tuple[int, ...]), ("old", str, "")])
    assert digest_of(later(host_id="h", ranks=(1,))) == digest_of(earlier("h", (1,)))
    assert digest_of(later(host_id="h", ranks=(1,), new=8)) != digest_of(earlier("h", (1,)))
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})


def test_what_this_release_sealed_stays_valid() -> None:
    """Kept from the first release with seals: a host may return it to any later one."""
    kept = "acfbdc96"
    assert digest_of(SPEC)[:8] == kept, "a seal that hosts hold would no longer be valid"


def test_a_start_of_an_older_release_stays_without_a_seal() -> None:
    body = StartWorkers(SPEC, WHOLE)
    assert SEALS.sealed("h0", body, FENCE) is body
