"""Checkpoints of a job on hosts, and the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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


_S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a prefix in a bucket of a real S3 server; credentials are in the environment."""
    server = subprocess.Popen(
        [sys.executable, "-c", _S3_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        client.close()
        yield "s3://bucket/some/prefix"
    finally:
        server.stdin.close()
        server.wait(60.0)
        server.stdout.close()
