"""Endpoints, certificates and pauses."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.errors import ConfigError
from strata.etcd.options import Address, Timing, TlsConfig, parse_endpoints


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host", Address("host:2379", None)),
        ("host:1", Address("host:1", None)),
        ("10.0.0.1:1", Address("10.0.0.1:1", None)),
        ("[::1]:1", Address("[::1]:1", None)),
        ("http://host:1", Address("host:1", False)),
        ("https://host:1/", Address("host:1", True)),
        (" https://[::1] ", Address("[::1]:2379", True)),
    ],
)
def test_endpoints(text: str, address: Address) -> None:
    assert parse_endpoints([text]) == [address]


def test_one_text_may_list_several_endpoints() -> None:
    assert [address.target for address in parse_endpoints("a:1,b:2")] == ["a:1", "b:2"]


@pytest.mark.parametrize(
    "endpoints",
    [[], [""], ["ftp://host:1"], ["host:port"], ["host:70000"], ["http://host:1/path"], ["u:p@host:1"]],
)
def test_an_invalid_endpoint_is_refused(endpoints: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_endpoints(endpoints)


def test_an_endpoint_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_endpoints(["a:1", "http://a:1"])


def test_pauses_grow_to_their_cap_and_are_jittered() -> None:
    low = Timing(chance=lambda: 0.0)
    high = Timing(chance=lambda: 1.0)
    assert [low.pause_s(n) for n in (-1, 0, 1)] == [0.0, 0.0, 0.0]
    assert [high.pause_s(n) for n in (2, 3, 4)] == [0.05, 0.1, 0.2]
    assert [low.pause_s(n) for n in (2, 3, 4)] == [0.025, 0.05, 0.1]
    assert high.pause_s(10_000) == 0.5


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="both"):
        TlsConfig(cert_file=Path("cert.pem")).credentials()


def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read /nowhere/ca.pem"):
        TlsConfig(ca_file=Path("/nowhere/ca.pem")).credentials()
