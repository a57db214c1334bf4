"""Seals start commands with the cluster's secret, and verifies what hosts return of them. Pure.

A daemon of another release encodes fields that this one does not have, and the other way round. So a digest is over
those values that are not a field's default: a field that is added later, with a default, changes no seal.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from flyball.contracts.checkpoints import RestorePlan
from flyball.contracts.cluster import JobSpec, Placement
from flyball.contracts.credentials import mac
from flyball.contracts.decisions import StartWorkers
from flyball.contracts.identity import Fence
from flyball.contracts.reports.grant_seals import GrantSeal
from flyball.contracts.reports.standings import HeldJob, HostStanding

_KEY_NAME = b"flyball grant seals v1"


def digest_of(value: object) -> str:
    """The digest of a contract value: the same for every release that knows its fields."""
    return hashlib.sha256(msgspec.json.encode(_without_defaults(value), order="sorted")).hexdigest()


def whole_digest(placement: Placement) -> str:
    """The digest of a whole placement, without who holds whose replicas: rank 0's host alone knows all of that."""
    restore = RestorePlan(placement.restore.step, {}) if placement.restore is not None else None
    hosts = tuple(sorted(placement.hosts, key=lambda host: host.ranks))
    return digest_of(msgspec.structs.replace(placement, hosts=hosts, peers={}, restore=restore))


class GrantSeals:
    """Thread-safe."""

    def __init__(self, secret: str, former: Iterable[str] = ()) -> None:
        """`former`: secrets whose seals are still valid."""
        self._keys = [mac(text.encode(), _KEY_NAME) for text in (secret, *former)]
        self._newest: dict[str, tuple[object, str]] = {}  # what all hosts of a placement share, by its kind

    def sealed(self, host_id: str, body: StartWorkers, fence: Fence) -> StartWorkers:
        """The command with its seal. Its `seal.whole` is set already, unless an older release began the action."""
        if not body.seal.whole:
            return body
        part = self._part(body.spec, body.placement)
        seal = GrantSeal(body.placement.run, fence.generation, fence.epoch, part, body.seal.whole)
        sealed = msgspec.structs.replace(seal, mac=_mac(self._keys[0], host_id, body.spec.job, seal))
        return msgspec.structs.replace(body, seal=sealed)

    def proves(self, host_id: str, held: HeldJob) -> bool:
        """Whether this cluster gave the host exactly what it says it holds."""
        seal, placement = held.seal, held.placement
        return (
            placement.host(host_id) is not None
            and placement.job == held.spec.job
            and held.fence == Fence(seal.epoch, seal.generation)
            and (placement.run, placement.generation) == (seal.run, seal.generation)
            and self.is_valid(host_id, held.spec.job, seal)
            and hmac.compare_digest(self._part(held.spec, placement), seal.part)
        )

    def is_valid(self, host_id: str, job: str, seal: GrantSeal) -> bool:
        """Whether this cluster gave the host some part of the seal's generation of a job."""
        given = seal.mac.encode()
        return any(hmac.compare_digest(_mac(key, host_id, job, seal).encode(), given) for key in self._keys)

    def word_of(self, standing: HostStanding) -> tuple[tuple[str, ...], dict[str, tuple[str, int]]]:
        """What a standing proves: the jobs that it holds, and job -> the run and the generation in which its host was
        placed and which it says has ended."""
        host_id = standing.host_id
        held = tuple(sorted({held.spec.job for held in standing.jobs if self.proves(host_id, held)}))
        ended = {
            job: (seal.run, seal.generation)
            for job, seal in standing.end_seals.items()
            if 0 <= seal.generation <= standing.ended.get(job, -1) and self.is_valid(host_id, job, seal)
        }
        return held, ended

    def _part(self, spec: JobSpec, part: Placement) -> str:
        lineage = self._shared("lineage", part.lineage)
        own = msgspec.structs.replace(part, lineage=())
        return digest_of((self._shared("spec", spec), lineage, own))

    def _shared(self, kind: str, value: object) -> str:
        """The digest of a value that the next host's command has, too: it may be long."""
        known, digest = self._newest.get(kind, (None, ""))
        if known is not value:
            digest = digest_of(value)
            self._newest[kind] = value, digest
        return digest


def _mac(key: bytes, host_id: str, job: str, seal: GrantSeal) -> str:
    named = [host_id, job, seal.run, seal.generation, seal.epoch, seal.part, seal.whole]
    return mac(key, b"flyball grant seal v1\0" + msgspec.json.encode(named)).decode()


def _without_defaults(value: object) -> Any:  # noqa: ANN401 - JSON has no static type
    if isinstance(value, msgspec.Struct):
        defaults = _defaults(type(value))
        if not defaults:
            return value  # its parts have none either
        found = {}
        for name, default in defaults.items():
            one = getattr(value, name)
            if default is msgspec.NODEFAULT or one != default:
                found[name] = _without_defaults(one)
        return found
    if isinstance(value, Mapping):
        return {name: _without_defaults(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_defaults(one) for one in value]
    return value


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Field -> its default; empty if no field has one."""
    fields = msgspec.structs.fields(kind)
    found = {
        field.name: field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        for field in fields
    }
    return found if any(default is not msgspec.NODEFAULT for default in found.values()) else {}
