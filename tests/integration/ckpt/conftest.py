"""Checkpoints of a job on hosts, and the command line."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import boto3
import pytest

sys.path.append(str(Path(__file__).parent))  # tests are not packages: the module is found by path
pytest.register_assert_rewrite("ckpt_sites")

from ckpt_sites import Site  # noqa: E402 - found by the path above


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Two hosts with one rank each, nothing saved yet."""
    return Site(tmp_path)


@pytest.fixture
def s3(s3_environment: str) -> str:
    """The URL of a prefix in a bucket of a real S3 protocol server; credentials are in the environment."""
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    client.close()
    return f"s3://{bucket}/some/prefix"
