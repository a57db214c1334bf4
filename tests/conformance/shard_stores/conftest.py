"""The places that the suite runs on: a folder as a host's disk, a folder that all hosts share, and an S3 bucket of
moto's server, which is a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.stores.places import Bucket, Folder, Place, make_shard

from ckpt_engine.format.manifest import Manifest
from flyball.contracts.checkpoints import Tier


@pytest.fixture
def bucket(s3_environment: str) -> Iterator[Bucket]:
    made = Bucket(s3_environment)
    yield made
    made.close()


@pytest.fixture(params=["disk folder", "persistent folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        found: Bucket = request.getfixturevalue("bucket")
        return found
    return Folder(Tier.DISK if request.param == "disk folder" else Tier.PERSISTENT, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(Tier.DISK, tmp_path)


@pytest.fixture
def persistent_folder(tmp_path: Path) -> Folder:
    return Folder(Tier.PERSISTENT, tmp_path)


@pytest.fixture(params=["persistent folder", "s3"])
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place that all hosts share."""
    if request.param == "s3":
        found: Bucket = request.getfixturevalue("bucket")
        return found
    return Folder(Tier.PERSISTENT, tmp_path)


@pytest.fixture
def shard() -> Callable[..., tuple[Manifest, bytes, memoryview]]:
    return make_shard
