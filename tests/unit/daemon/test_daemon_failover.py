"""The order of servers: a host's own, the next one when that fails, and its own again after a while."""

from __future__ import annotations

from collections import Counter

from support.clocks.manual import ManualClock

from host_daemon.link.http_client import GO_HOME_AFTER_S, Endpoints

URLS = ("http://a", "http://b", "http://c")


def test_every_host_tries_all_servers_starting_with_its_own() -> None:
    homes = Counter()
    for number in range(300):
        order = Endpoints(URLS, f"host-{number}", ManualClock()).in_order()
        assert sorted(order) == sorted(URLS)
        assert order == Endpoints(URLS, f"host-{number}", ManualClock()).in_order()
        homes[order[0]] += 1
    assert min(homes.values()) > 70


def test_it_stays_with_a_server_that_replies_until_that_fails_too() -> None:
    servers = Endpoints(URLS, "host-a", ManualClock())
    first, second, third = servers.in_order()
    servers.failed(first)
    assert servers.in_order() == (second, third, first)
    servers.failed(first)  # another call, begun earlier
    assert servers.in_order() == (second, third, first)
    servers.failed(second)
    servers.failed(third)
    assert servers.in_order() == (first, second, third)


def test_it_returns_to_its_own_after_a_while() -> None:
    clock = ManualClock()
    servers = Endpoints(URLS, "host-a", clock)
    home = servers.in_order()[0]
    servers.failed(home)
    clock.now_s += GO_HOME_AFTER_S - 1.0
    assert servers.in_order()[0] != home
    clock.now_s += GO_HOME_AFTER_S + 1.0
    assert servers.in_order()[0] == home


def test_a_single_server_is_tried_every_time() -> None:
    servers = Endpoints(URLS[:1], "host-a", ManualClock())
    servers.failed(URLS[0])
    assert servers.in_order() == URLS[:1]
    assert not servers.are_several
