"""The places that the suite runs on: a folder as a host's disk, a folder that all hosts share, and an S3 bucket of
moto's server, which is a separate process."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import boto3
import httpx
import numpy as np
from safetensors.numpy import save
from support.stores.shards import make_manifest

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.opening import open_storage
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import Storage
from flyball.contracts.checkpoints import Tier

SETTINGS = EngineSettings(store_timeout_s=60.0, store_retry_s=60.0)


def make_shard(
    step: int, rank: int = 0, *, generation: int = 1, size_bytes: int = 1_400_000
) -> tuple[Manifest, bytes, memoryview]:
    """(manifest, its bytes, the safetensors file)."""
    rng = np.random.default_rng(step * 1000 + rank)
    payload = save({"w": rng.integers(0, 256, size_bytes, np.uint8), "step": np.array([step, rank])})
    described = make_manifest(payload, step, rank, generation=generation, world_size=2, chunk_bytes=1 << 16)
    return described, manifests.encode(described), memoryview(payload)


class Place(ABC):
    """A place for a job's shards. `url` is for engines; the other methods bypass the engine."""

    tier: Tier
    url: str
    flip_every = 1  # how many bytes lie between two that a test flips

    def storage(self) -> Storage:
        return open_storage(self.url, SETTINGS)

    def store(self, storage: Storage | None = None) -> ShardStore:
        """Another process's view."""
        host_id = "host" if self.tier is Tier.DISK else ""
        return ShardStore(storage or self.storage(), tier=self.tier, job="job", host_id=host_id)

    @abstractmethod
    def put(self, name: str, content: bytes) -> None: ...
    def put_many(self, names: Iterable[str]) -> None:
        """Empty ones."""
        for name in names:
            self.put(name, b"")

    @abstractmethod
    def get(self, name: str) -> bytes: ...
    @abstractmethod
    def delete(self, name: str) -> None: ...
    @abstractmethod
    def names(self) -> set[str]: ...


class Folder(Place):
    def __init__(self, tier: Tier, root: Path) -> None:
        self.tier, self.root = tier, root / "job"
        self.url = str(self.root)

    def put(self, name: str, content: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(content)

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def delete(self, name: str) -> None:
        (self.root / name).unlink()

    def names(self) -> set[str]:
        return {path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file()}


class Bucket(Place):
    tier = Tier.PERSISTENT
    flip_every = 7  # what arrives is verified by the code that verifies files, and each flip costs several requests

    def __init__(self, endpoint: str) -> None:
        self.client: Any = boto3.client("s3", endpoint_url=endpoint)
        self.endpoint = endpoint
        self.bucket = f"b{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=self.bucket)
        self.url = f"s3://{self.bucket}/some/prefix/job"

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"some/prefix/job/{name}", Body=content)

    def put_many(self, names: Iterable[str]) -> None:
        with httpx.Client(base_url=self.endpoint, timeout=60.0) as client:  # several times faster than the default
            for name in names:
                client.put(f"/{self.bucket}/some/prefix/job/{name}", content=b"").raise_for_status()

    def get(self, name: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=f"some/prefix/job/{name}")["Body"].read()
        return body

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"some/prefix/job/{name}")

    def names(self) -> set[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = (found["Key"] for page in pages for found in page.get("Contents", ()))
        return {key.removeprefix("some/prefix/job/") for key in keys}

    def close(self) -> None:
        self.client.close()

    def uploads(self) -> list[str]:
        """Incomplete uploads."""
        listed = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ())
        return [upload["Key"].removeprefix("some/prefix/job/") for upload in listed]
