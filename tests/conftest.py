"""What tests have for themselves: Redis servers that they may fill, flush, stop and kill, and a database of the MariaDB
server that runs here; Ctrl-C, however they were started; and what Hypothesis may judge: never how long it took."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pymysql
import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

pytest.register_assert_rewrite("support")

from support import costs, rings  # noqa: E402 - once its asserts are rewritten
from support.commands.warm_python import WarmPython  # noqa: E402
from support.servers.own_servers import OwnMariaDb, OwnRedis  # noqa: E402

# Hundreds of processes are started, and each would compile all of Flyball for itself.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The same examples each time, on a machine of any speed; `pytest --hypothesis-profile random` draws new ones.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("fixed")

# Hypothesis also draws constants that it finds in whatever modules of ours are loaded by then: each order of the tests,
# and each share of them that a worker got, would have examples of its own.
_constants_of_loaded_modules = providers._get_local_constants


def _constants() -> Constants:
    is_fixed = settings.get_current_profile_name() == "fixed"
    return Constants() if is_fixed else _constants_of_loaded_modules()


providers._get_local_constants = _constants

# Modules and tests stay until the end: to look through them again and again is a third of the collection's time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


_guard = rings.Guard()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rings.mark(items)
    if hasattr(config, "workerinput"):
        rings.order(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    costs.begin(item)
    with _guard.watching(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        yield
        _guard.judge()
    finally:
        costs.end(item)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(costs.Bill(), "costs of the tests")


# A shell that starts the tests in the background has Ctrl-C ignored, here and in every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def structlog_as_before() -> Iterator[None]:
    """A command that runs in this process sets what is logged, and would do so for the tests that follow."""
    yield from _structlog_kept()


@pytest.fixture(autouse=True, scope="module")
def structlog_as_before_the_module() -> Iterator[None]:
    """So does a supervisor that a module's fixture starts in this process, before any of the module's tests."""
    yield from _structlog_kept()


def _structlog_kept() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OwnRedis]]:
    """Starts servers with the options of redis-server; they end with the test."""
    yield from _redis_servers(tmp_path_factory)


@pytest.fixture(scope="module")
def redis_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OwnRedis]]:
    """As `own_redis`; they end with the module."""
    yield from _redis_servers(tmp_path_factory)


def _redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OwnRedis]]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed")
    started: list[OwnRedis] = []

    def start(*options: str) -> OwnRedis:
        started.append(OwnRedis(tmp_path_factory.mktemp("redis"), *options))
        return started[-1]

    yield start
    for server in started:
        server.end()


@pytest.fixture
def mariadb_url() -> Iterator[str]:
    """Of an empty database, which is dropped with the test."""
    try:
        server = pymysql.connect(host="127.0.0.1", user="root", password="", connect_timeout=60)
    except pymysql.err.OperationalError as error:
        pytest.skip(f"no MySQL or MariaDB server at 127.0.0.1:3306 ({error})")
    name = f"flyball_test_{uuid.uuid4().hex[:12]}"
    with server, server.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        yield f"mysql://root@127.0.0.1:3306/{name}"
        cursor.execute(f"DROP DATABASE {name}")


@pytest.fixture(scope="module")
def own_mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], OwnMariaDb]]:
    """Starts servers; they end with the module."""
    if shutil.which("mariadb-install-db") is None or shutil.which("mariadbd") is None:
        pytest.skip("no MariaDB server is installed")
    started: list[OwnMariaDb] = []

    def start() -> OwnMariaDb:
        started.append(OwnMariaDb(tmp_path_factory.mktemp("mariadb")))
        return started[-1]

    yield start
    for server in started:
        server.end()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Runs training scripts without the import of torch for each."""
    warm = WarmPython()
    yield warm
    warm.close()


_S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of moto's server, which runs as a process of its own."""
    log = (tmp_path_factory.mktemp("moto") / "server.log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-c", _S3_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.stdin.close()
        server.wait(90.0)
        server.stdout.close()
        log.close()


@pytest.fixture
def s3_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The names that a user of S3 has in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return s3_endpoint


@pytest.fixture
def s3(s3_environment: str) -> str:
    """The URL of a prefix in a bucket of a real S3 protocol server; credentials are in the environment."""
    import boto3  # only here: it takes a while

    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    client.close()
    return f"s3://{bucket}/some/prefix"
