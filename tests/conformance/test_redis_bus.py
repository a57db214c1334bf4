"""The Redis bus when Redis loses data, is unsuitable, or is away."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.servers.own_servers import free_port

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, FlyballError, TooBusy, Unreachable
from services.bus import redis_client
from services.bus.redis_client import TIMEOUT_S, RedisServer
from services.bus.redis_streams import RedisBus
from services.bus.redis_wakeup import RedisWakeup
from services.rules.stream import Cursor

KEY = "t:signals"


@pytest.fixture
def server(own_redis):
    return own_redis()


@pytest.fixture
def connect() -> Iterator[Callable[[str], RedisBus]]:
    with ExitStack() as stack:
        yield lambda url: RedisBus(stack.enter_context(closing(RedisServer(url))), prefix="t", max_length=40)


@pytest.fixture
def bus(server, connect) -> RedisBus:
    return connect(server.url)


@pytest.fixture
def stopped(server, connect, make, monkeypatch: pytest.MonkeyPatch) -> RedisBus:
    """A bus with the product's timeouts, on a stopped server that holds one signal."""
    fill(connect(server.url), make, 1)
    monkeypatch.setattr(redis_client, "TIMEOUT_S", TIMEOUT_S)
    impatient = connect(server.url)
    server.process.send_signal(signal.SIGSTOP)
    return impatient


def go_on(server, bus: RedisBus) -> None:
    """Let the server answer again, with long timeouts: the machine may be busy."""
    connections = bus._server.client.connection_pool
    connections.connection_kwargs.update(socket_timeout=60.0, socket_connect_timeout=60.0)
    connections.disconnect()
    connections.reset()  # existing connections keep their own timeouts, even when they reconnect
    server.process.send_signal(signal.SIGCONT)


def seqs(bus: RedisBus, after: Cursor | None = None, limit: int = 1000) -> list[int]:
    return [delivered.signal.seq for delivered in bus.read(after, limit=limit)]


def fill(bus: RedisBus, make, *numbers: int) -> Cursor:
    bus.publish([make.signal(seq) for seq in numbers])
    return bus.read(None, limit=1000)[-1].cursor


@pytest.mark.parametrize("how", ["flushed", "deleted", "killed"])
def test_what_comes_after_a_loss_is_seen_from_every_cursor(server, bus, make, how: str) -> None:
    last = fill(bus, make, 1, 2, 3)
    if how == "flushed":
        server.client.flushall()
    elif how == "deleted":  # by hand, or evicted
        assert server.client.delete(KEY) == 1
    else:
        server.kill()
        server.start()
    assert bus.read(last, limit=10) == []
    after = fill(bus, make, 4, 5, 6, 7)
    assert seqs(bus, last) == [4, 5, 6, 7]
    assert (after.stream, after.position) > (last.stream, last.position)
    bus.trim(last)  # from a leader that does not know of the loss
    assert seqs(bus, last) == [4, 5, 6, 7]


def test_everything_is_in_one_key(server, bus, make) -> None:
    """No part can be lost alone."""
    bus.trim(fill(bus, make, 1))
    assert server.client.keys() == [KEY.encode()]


def test_positions_that_an_older_snapshot_gives_out_again_hide_nothing(server, bus, make) -> None:
    fill(bus, make, 1, 2)
    server.client.save()
    stored = fill(bus, make, 3, 4)  # the leader's cursor; the snapshot lacks these two
    server.kill()
    server.start()
    assert seqs(bus, stored) == [
        1,
        2,
    ]  # a cursor ahead of the stream reads from the beginning: twice is better than never
    bus.publish([make.signal(seq) for seq in (5, 6, 7)])
    assert seqs(bus, stored) == [5, 6, 7]
    assert seqs(bus) == [1, 2, 5, 6, 7]


def test_a_cursor_that_was_stored_under_another_bus_begins_at_the_beginning(bus, make) -> None:
    fill(bus, make, 1, 2)
    assert seqs(bus, Cursor("0" * 32, 1)) == [1, 2]
    assert seqs(bus, Cursor("9" * 19, 1)) == [1, 2]
    bus.trim(Cursor("9" * 19, 1))
    assert seqs(bus) == [1, 2]


@pytest.mark.parametrize("fields", [{"signal": '{"body": 1}'}, {"other": "field"}])
def test_an_entry_that_is_no_signal_is_skipped(server, bus, make, fields: dict[str, str]) -> None:
    last = fill(bus, make, 1)
    for more in range(10, 15):
        server.client.xadd(KEY, fields, id=f"{last.stream}-{last.position + more}")
    bus.publish([make.signal(2)])
    assert seqs(bus) == [1, 2]
    assert seqs(bus, last, limit=2) == [2]  # a page of only such entries is not the end


def test_entries_of_a_stranger_hide_nothing(server, bus, make) -> None:
    server.client.xadd(KEY, {"a": "b"})
    server.client.xadd(KEY, {"a": "b"})
    assert seqs(bus, None, limit=1) == []
    fill(bus, make, 1, 2)
    assert seqs(bus, None, limit=1) == [1]


def expect(kind: type[FlyballError], words: str, work: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words) as caught:
        work()
    assert caught.value.hint
    assert "sesame" not in str(caught.value)


def test_a_memory_that_is_full(server, bus, make) -> None:
    fill(bus, make, 1)
    server.client.config_set("maxmemory", 1)
    expect(Unreachable, "memory of Redis .* is full", lambda: bus.publish([make.signal(2)]))
    assert seqs(bus) == [1]
    server.client.config_set("maxmemory", 0)
    bus.publish([make.signal(2)])
    assert seqs(bus) == [1, 2]


def test_a_replica_takes_nothing(server, bus, make) -> None:
    server.client.replicaof("127.0.0.1", 1)
    expect(Unreachable, "takes no writes", lambda: bus.publish([make.signal(1)]))
    server.client.replicaof("NO", "ONE")
    bus.publish([make.signal(1)])
    assert seqs(bus) == [1]


def test_a_password_that_is_missing_or_wrong(own_redis, connect, make) -> None:
    port = own_redis("--requirepass", "open-sesame").port
    for user in ("", ":wrong-sesame@"):
        expect(ConfigurationError, "refuses this process", RedisServer(f"redis://{user}127.0.0.1:{port}").check)
    good = RedisServer(f"redis://:open-sesame@127.0.0.1:{port}/3")
    good.check()
    assert good.name == f"127.0.0.1:{port}/3"
    good.close()


def test_tls(own_redis, connect, make, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl is installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ("-subj", "/CN=flyball", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *subject)
    subprocess.run(["openssl", *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    port = free_port()
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    own_redis("--tls-port", str(port), *files)
    bus = connect(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}")
    bus.publish([make.signal(1)])
    assert seqs(bus) == [1]
    expect(ConfigurationError, "is not trusted", RedisServer(f"rediss://127.0.0.1:{port}/0").check)


def test_the_rights_that_the_documents_name_are_enough(server, connect, make) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "deploying.md").read_text()
    (rights,) = re.findall(r"`(\+@scripting[^`]*)`", page)
    own = {"keys": ["t:*"], "channels": ["t:*"], "commands": rights.split()}
    server.client.acl_setuser("flyball", enabled=True, nopass=True, **own)
    url = server.url.replace("//", "//flyball:x@")
    bus = connect(url)
    bus.publish([make.signal(1)])
    bus.trim(bus.read(None, limit=1)[0].cursor)
    assert bus.length() == 0
    with closing(RedisServer(url)) as redis:
        redis.check()
        wakeup = RedisWakeup(redis, prefix="t", topics=["signals"], clock=SystemClock())
        stop = threading.Event()
        threads = [threading.Thread(target=run, args=(stop,)) for run in (wakeup.run_listener, wakeup.run_sender)]
        with redis.client.pubsub() as other:
            other.subscribe("t:wakeup:actions")
            for thread in threads:
                thread.start()
            wakeup.notify("actions")
            received = [other.get_message(timeout=60.0)["type"] for _ in range(2)]
            is_listening = wakeup.wait("signals", 60.0)
            stop.set()
            for thread in threads:
                thread.join(60.0)
    assert (received, is_listening) == (["subscribe", "message"], True)


def test_a_user_without_rights(server, connect, make) -> None:
    server.client.acl_setuser("poor", enabled=True, nopass=True, commands=["+get", "+eval", "+evalsha"], keys=["*"])
    poor = connect(server.url.replace("//", "//poor:x@"))
    expect(ConfigurationError, "refuses this process", lambda: poor.publish([make.signal(1)]))


def test_a_cache_is_refused(server) -> None:
    redis = RedisServer(server.url)
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    redis.check()  # without a limit nothing is evicted
    server.client.config_set("maxmemory", 100 << 20)
    expect(ConfigurationError, "is a cache", redis.check)
    redis.close()


def test_a_key_of_another_program(server, bus, make) -> None:
    server.client.set(KEY, "mine")
    expect(ConfigurationError, "is used by something else", lambda: bus.publish([make.signal(1)]))
    expect(ConfigurationError, "is used by something else", lambda: bus.read(None, limit=1))


def test_a_server_that_is_stopped_or_away_is_given_up_in_time(server, stopped, make) -> None:
    expect(Unreachable, "does not answer", lambda: stopped.publish([make.signal(2)]))  # it never does
    go_on(server, stopped)
    assert seqs(stopped)[0] == 1
    server.kill()
    expect(Unreachable, "does not answer", lambda: stopped.read(None, limit=1))


def test_a_slow_server_is_not_filled_with_repeated_signals(server, stopped, make) -> None:
    bus, batch = stopped, [make.signal(seq) for seq in range(2, 12)]
    for _ in range(4):  # the server would store each of these in the end: the stream holds 40
        with pytest.raises(Unreachable):
            bus.publish(batch)
    go_on(server, bus)
    deadline_s = time.monotonic() + 60.0
    while True:
        try:
            bus.publish(batch)
            break
        except Unreachable:
            assert time.monotonic() < deadline_s
    assert seqs(bus) == list(range(1, 12))
    bus.publish(batch)  # a repeated signal that is known to be stored is not searched for
    assert seqs(bus) == [*range(1, 12), *range(2, 12)]


def test_what_was_not_stored_before_the_reply_was_lost_is_sent_again(server, bus, make) -> None:
    fill(bus, make, 1)
    server.kill()
    with pytest.raises(Unreachable):
        bus.publish([make.signal(2)])
    server.start()
    bus.publish([make.signal(2)])
    assert seqs(bus)[-1] == 2


def test_the_bound_counts_what_other_incarnations_left(server, bus, make) -> None:
    fill(bus, make, *range(30))
    server.client.save()
    server.kill()
    server.start()
    bus.publish([make.signal(seq) for seq in range(30, 40)])
    with pytest.raises(TooBusy):
        bus.publish([make.signal(40)])
    assert bus.length() == 40
    assert seqs(bus) == list(range(40))


@pytest.mark.parametrize("url", ["", "http://127.0.0.1", "redis://127.0.0.1:sesame", "redis://h/0?socket_timeout=x"])
def test_a_url_that_is_no_redis_url(url: str) -> None:
    expect(ConfigurationError, "cannot use this Redis URL", lambda: RedisServer(url))
