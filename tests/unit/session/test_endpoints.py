from __future__ import annotations

import collections
import itertools
import math
import random
from pathlib import Path

import pytest

from strata.config import Credentials
from strata.errors import ConfigError
from strata.session.endpoints import Route, parse_endpoints


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("host:1", "dns:///host:1"),
        ("host", "dns:///host:50051"),
        ("http://[::1]:50051", "ipv6:[::1]:50051"),
        ("http://host:8/", "dns:///host:8"),
        ("grpc://10.0.0.7:9", "ipv4:10.0.0.7:9"),
        ("[::1]", "ipv6:[::1]:50051"),
        ("[fe80::1%eth0]:7", "ipv6:[fe80::1%25eth0]:7"),
        ("a_b.c-d.example:7", "dns:///a_b.c-d.example:7"),
        ("unix:/run/strata.sock", "unix:/run/strata.sock"),
        ("unix:///run/strata.sock", "unix:/run/strata.sock"),
    ],
)
def test_an_endpoint_is_translated_to_its_grpc_target(text: str, target: str) -> None:
    (endpoint,) = parse_endpoints(text)
    assert endpoint.target == target


def test_lists_keep_their_order_and_drop_repetitions() -> None:
    assert [str(e) for e in parse_endpoints(" b:2, a:1,,b:2 ")] == ["b:2", "a:1"]
    assert [str(e) for e in parse_endpoints(["[::1]:1", "a:1,unix:/x"])] == ["[::1]:1", "a:1", "unix:/x"]


@pytest.mark.parametrize(
    "text",
    [
        "node..example:1",
        "n" * 64 + ".example:1",
        "", " , ", "host:0", "host:65536", "host:x", "::1:50051", "[::1", "[host]:1", "[1.2.3.4]:1",
        "ftp://host:1", "unix:relative", "http://", "a b:1", "host:1/path", "user@host:1", "host:-1", "host:\u0661",
    ],
)  # fmt: skip
def test_an_invalid_endpoint_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_endpoints(text)
    assert refusal.value.hint


def route(text: str, seed: int = 0) -> Route:
    return Route(parse_endpoints(text), random.Random(seed))


def test_members_start_at_different_endpoints() -> None:
    firsts = {str(route("a:1,b:1,c:1", seed).next()[0]) for seed in range(50)}
    assert firsts == {"a:1", "b:1", "c:1"}


@pytest.mark.parametrize("seed", range(20))
def test_the_first_reconnect_is_elsewhere_within_100_ms_and_later_ones_are_capped(seed: int) -> None:
    way = route("a:1,b:1,c:1", seed)
    first, delay_s = way.next()
    assert delay_s == 0
    way.reached()
    second, delay_s = way.next()
    assert second != first
    assert delay_s < 0.1
    tried, delays = [second], []
    for _ in range(20):
        endpoint, delay_s = way.next()
        assert endpoint != tried[-1]
        tried.append(endpoint)
        delays.append(delay_s)
    assert set(tried) == {first, *tried}
    assert delays[0] <= 0.1
    assert max(delays) <= 1.0, "three in a row make a round of three seconds at most"
    assert min(delays[10:]) >= 0.5
    assert len(set(delays[10:])) == len(delays[10:]), "jittered"


@pytest.mark.parametrize("count", range(2, 7))
@pytest.mark.parametrize("stagger_s", [0.0, 1.3, 2.6, 4.1, 7.0, 11.0])
def test_the_only_live_endpoint_is_tried_within_the_leader_s_grace(count: int, stagger_s: float) -> None:
    names = [f"{letter}:1" for letter in "abcdef"[:count]]
    for seed, alone in itertools.product(range(20), names):
        way = Route(parse_endpoints(",".join(names)), random.Random(seed))
        silent_from = {name: stagger_s * i for i, name in enumerate(n for n in names if n != alone)}
        way.next()
        way.reached()
        now, took_s, requested_s = 0.0, 0.0, [0.0]
        given = collections.Counter[str]()
        while now < 60.0:
            endpoint, delay_s = way.next(took_s=took_s)
            now += delay_s
            if str(endpoint) == alone:
                requested_s.append(now)
            took_s = way.connect_s if now >= silent_from.get(str(endpoint), math.inf) else 0.001
            given[str(endpoint)] += way.connect_s == 2.0
            now += took_s
        assert max(b - a for a, b in itertools.pairwise(requested_s)) < 4.75
        assert all(given[name] >= 2 for name in names), "each is given all the time now and then"


def test_the_duration_of_a_try_is_part_of_the_pause_after_it() -> None:
    way, same = route("a:1,b:1"), route("a:1,b:1")
    for _ in range(10):
        way.next()
        same.next()
    assert same.next(took_s=0.5)[1] == pytest.approx(max(0.0, way.next()[1] - 0.5))
    assert way.next(took_s=9.0)[1] == 0.0


def test_ready_replicas_are_preferred_once_and_only_if_configured() -> None:
    way = route("a:1,b:1,c:1,d:1")
    way.next()
    way.reached()
    ready = next(str(e) for e in parse_endpoints("a:1,b:1,c:1,d:1") if e != way.current)
    way.prefer([ready, "elsewhere:9", "not an address"])
    assert str(way.next()[0]) == ready
    assert str(way.next()[0]) != ready


def test_a_redirect_from_a_replica_is_tried_first() -> None:
    way = route("a:1,b:1,c:1")
    here, _ = way.next()
    target = next(e for e in parse_endpoints("a:1,b:1,c:1") if e != here)
    way.go_to([str(here), str(target), "10.9.9.9:1"])
    assert way.next()[0] == target


def test_an_unconfigured_address_is_used_only_if_there_is_no_other() -> None:
    alone = route("a:1")
    alone.next()
    alone.go_to(["10.9.9.9:1"])
    assert str(alone.next()[0]) == "10.9.9.9:1"
    assert str(alone.next()[0]) == "a:1"
    several = route("a:1,b:1")
    several.next()
    several.go_to(["10.9.9.9:1"])
    assert str(several.next()[0]) in {"a:1", "b:1"}


SECURE = Credentials(ca_file=Path("ca.pem"))


@pytest.mark.parametrize(
    ("text", "credentials", "tls"),
    [
        ("host:1", SECURE, True),
        ("https://host:1", Credentials(), True),
        ("http://host:1", Credentials(insecure=True), False),
        ("host:1", Credentials(insecure=True), False),
        ("http://127.0.0.1:1", SECURE, False),
        ("127.0.0.1:1", SECURE, True),
        ("localhost:1", Credentials(), False),
        ("grpc://[::1]:1", Credentials(), False),
        ("unix:/x", Credentials(), False),
    ],
)
def test_tls_follows_from_scheme_and_credentials(text: str, credentials: Credentials, tls: bool) -> None:
    (endpoint,) = parse_endpoints(text, credentials)
    assert endpoint.tls is tls


@pytest.mark.parametrize("text", ["host:1", "http://host:1", "10.0.0.1:1", "127.0.0.1:1,http://host:2"])
def test_plaintext_does_not_leave_this_host_unasked(text: str) -> None:
    with pytest.raises(ConfigError, match="plaintext") as error:
        parse_endpoints(text, Credentials())
    assert "--insecure" in error.value.hint


def test_redirect_targets_use_the_tls_setting_of_the_configured_endpoints() -> None:
    way = Route(parse_endpoints("https://a:1"), random.Random(1))
    way.next()
    way.go_to(["b:2"])
    endpoint, _delay = way.next()
    assert (str(endpoint), endpoint.tls) == ("b:2", True)
