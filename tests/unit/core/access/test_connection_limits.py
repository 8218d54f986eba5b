"""Connection limits: which connections are closed, and which are never closed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.access.connection_limits import (
    HTTP_CONNECTIONS,
    MAX_STRANGERS,
    Connections,
    Limits,
    Reason,
    address_key,
    plain_host,
    shares,
    worst_address,
)
from strata.errors import ConfigError

LIMITS = Limits(most=6, per_address=4, strangers=3, stranger_s=10.0)


def connections(*opened: tuple[int, str], limits: Limits = LIMITS) -> Connections[int]:
    made: Connections[int] = Connections(limits)
    for number, address in opened:
        made.opened(number, address, float(number))
    return made


def closed(of: Connections[int], now_s: float = 9.0) -> list[tuple[int, Reason]]:
    return [(each.connection, each.reason) for each in of.excess(now_s)]


def test_only_an_unadmitted_connection_is_closed_after_its_time_limit() -> None:
    of = connections((1, "a"), (2, "a"), (3, "b"))
    of.admitted(1)
    assert closed(of, 12.0) == []
    assert closed(of, 12.5) == [(2, Reason.UNADMITTED)]
    assert closed(of, 100.0) == [(3, Reason.UNADMITTED)]
    assert len(of) == 1


def test_too_many_unadmitted_connections_close_the_oldest_of_the_busiest_address() -> None:
    of = connections((1, "b"), (2, "a"), (3, "a"), (4, "a"), (5, "c"))
    assert closed(of) == [(2, Reason.STRANGERS), (3, Reason.STRANGERS)]


@pytest.mark.parametrize(
    ("admitted", "strangers", "closed_ports"),
    [
        ("aaa", "aaa", [(3, Reason.ADDRESS), (4, Reason.ADDRESS)]),  # never those of admitted callers
        ("aaaaa", "", [(4, Reason.ADDRESS)]),  # the newest connection of the address is closed
        ("aaaabcd", "", [(3, Reason.ALL)]),  # the newest of the address with most connections is closed
        ("abcdef", "x", [(6, Reason.ALL)]),  # connections of unknown callers are closed first
    ],
)
def test_too_many_connections_close_the_expected_ones(
    admitted: str, strangers: str, closed_ports: list[tuple[int, Reason]]
) -> None:
    of = connections(*enumerate(admitted + strangers))
    for number in range(len(admitted)):
        of.admitted(number)
    assert closed(of) == closed_ports


def test_a_closed_connection_no_longer_counts_and_is_not_closed_again() -> None:
    of = connections((1, "a"), (2, "a"), (3, "a"))
    of.closed(1)
    of.closed(1)
    of.admitted(1)
    of.opened(4, "a", 4.0)
    assert closed(of) == []
    assert sorted(of.all()) == [2, 3, 4]


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["open", "admit", "close", "look"]), st.integers(0, 40), st.sampled_from("abc")
        )
    )
)
def test_the_excess_check_keeps_all_limits_and_closes_strangers_first(
    steps: list[tuple[str, int, str]],
) -> None:
    of: Connections[int] = Connections(replace(LIMITS, most=5))
    here: dict[int, str] = {}
    known: set[int] = set()
    for now, (step, number, address) in enumerate([*steps, ("look", 0, "a")]):
        if step == "open" and number not in here:
            of.opened(number, address, float(now))
            here[number] = address
        elif step == "admit" and number in here:
            of.admitted(number)
            known.add(number)
        elif step == "close":
            of.closed(number)
            here.pop(number, None)
            known.discard(number)
        elif step == "look":
            for each in of.excess(float(now)):
                assert here.pop(each.connection) == each.address
                if each.connection in known:
                    known.remove(each.connection)
                    same = {n for n, a in here.items() if a == each.address or each.reason is Reason.ALL}
                    assert same <= known, "a stranger stayed, and somebody known went"
            per = [list(here.values()).count(a) for a in "abc"]
            assert max(per) <= 4
            assert len(here) <= 5
            assert len(set(here) - known) <= 3
        assert sorted(of.all()) == sorted(here)


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("2001:db8:0:0:9::1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("nonsense", "nonsense"),
        ("", ""),
    ],
)
def test_an_ipv6_host_is_counted_by_its_network(host: str, key: str) -> None:
    assert address_key(host) == key


def test_all_forms_of_an_ip_address_normalize_to_the_same_host() -> None:
    assert plain_host("::FFFF:127.0.0.1") == plain_host("127.0.0.1")
    assert plain_host("fe80:0::1%eth0") == plain_host("fe80::1%2")


def test_the_address_with_most_closed_connections_is_named() -> None:
    of = connections(*((number, "ab"[number % 3 == 0]) for number in range(9)))
    assert (worst_address(of.excess(9.0)), worst_address([])) == ("a", "")


@pytest.mark.parametrize("descriptors", [256, 1024, 4096, 20_000, 1 << 20])
def test_ports_share_the_descriptors_left_after_etcd_peers_and_probes(descriptors: int) -> None:
    found = shares(descriptors=descriptors, most=8_192, per_address=1_024)
    http = found.http_silent.most + found.http_speaking.most
    assert found.grpc.most + http + 128 <= descriptors
    assert http <= HTTP_CONNECTIONS
    assert found.grpc.strangers <= min(MAX_STRANGERS, (found.grpc.most + 1) // 2)
    assert found.grpc.per_address <= 1_024


def test_too_few_descriptors_are_a_config_error_at_startup() -> None:
    with pytest.raises(ConfigError, match="descriptors allows") as raised:
        shares(descriptors=200, most=8_192, per_address=1_024)
    assert "LimitNOFILE" in str(raised.value.hint)
