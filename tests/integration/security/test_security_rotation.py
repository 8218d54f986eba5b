"""Certificates are replaced under running processes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strata.config import Credentials
from strata.core.access.authority import Role
from strata.errors import ConfigError
from strata.security.certificates import Authority, describe
from strata.security.probe import explain
from strata.v1.watch_pb2 import WatchRequest
from strata.v1.watch_pb2_grpc import WatchStub
from tests.secured_fixtures import LIMIT_S, NOW, Secured, issued, sync_channel

DAY = dt.timedelta(days=1)


def serial(address: str, credentials: Credentials) -> str:
    """Return the serial number of the certificate that a server shows to a new connection."""
    assert credentials.ca_file is not None
    assert credentials.cert_file is not None
    context = ssl.create_default_context(cafile=str(credentials.ca_file))
    context.load_cert_chain(credentials.cert_file, credentials.key_file)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), LIMIT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as tls,
    ):
        shown: Any = tls.getpeercert()
    return str(shown["serialNumber"]).lower().lstrip("0")


def test_new_connections_use_the_new_certificate_and_old_ones_stay_open(secured: Secured) -> None:
    folder, address = secured.folder / "coordinator-3", secured.local.coordinators[2].address
    viewer = secured.who(Role.VIEWER, "v")
    old = describe(folder / "cert.pem").serial
    assert serial(address, viewer) == old
    with sync_channel(address, viewer) as channel:
        stub: Any = WatchStub(channel)
        stream = stub.Watch(WatchRequest(job="rotation"), timeout=LIMIT_S)
        next(stream)
        new = secured.authority.renew(folder, now=dt.datetime.now(dt.UTC)).serial
        assert serial(address, viewer) == new != old
        next(stream)  # a progress message, which comes on the earlier connection


def test_a_certificate_that_cannot_be_used_is_not_taken(secured: Secured) -> None:
    folder, address = secured.folder / "coordinator-2", secured.local.coordinators[1].address
    viewer = secured.who(Role.VIEWER, "v")
    used = describe(folder / "cert.pem").serial
    secured.authority.renew(folder, now=NOW - 100 * DAY, days=10)  # long expired
    assert serial(address, viewer) == used
    log = secured.local.coordinators[1].log.read_text()
    assert "certificate_not_loaded" in log
    assert "expired on" in log
    newest = secured.authority.renew(folder, now=dt.datetime.now(dt.UTC), days=100).serial
    assert serial(address, viewer) == newest


def test_an_authority_is_replaced_by_trusting_both_for_a_while(secured: Secured, tmp_path: Path) -> None:
    address = secured.local.coordinators[0].address
    other = Authority.create(tmp_path / "ca", cluster="default", now=NOW)
    theirs = issued(other, tmp_path / "v", Role.VIEWER, "v")
    assert theirs.ca_file is not None
    trusted = secured.folder / "coordinator-1" / "ca.pem"
    both = trusted.read_bytes() + theirs.ca_file.read_bytes()
    mine = Credentials(
        ca_file=secured.authority.folder / "ca.pem", cert_file=theirs.cert_file, key_file=theirs.key_file
    )
    new = trusted.with_name("new.pem")
    new.write_bytes(both)
    new.replace(trusted)
    assert serial(address, mine) == describe(secured.folder / "coordinator-1" / "cert.pem").serial
    with secured.client(mine) as client:
        assert client.status().answered_by == "coordinator-1"  # only this replica trusts the new authority


def test_a_client_takes_its_new_certificate_for_the_next_connection(secured: Secured) -> None:
    mine = secured.who(Role.VIEWER, "v", now=NOW - 10 * DAY, days=5)
    assert mine.cert_file is not None
    with secured.client(mine) as client:
        with pytest.raises(ConfigError, match="expired on"):
            client.status()
        secured.authority.renew(mine.cert_file.parent, now=dt.datetime.now(dt.UTC))
        assert client.status().cluster == "default"


# -- a server whose certificate has expired


@contextlib.asynccontextmanager
async def serving(credentials: Credentials) -> AsyncIterator[int]:
    """Serve TLS with this certificate, even if it is expired or not yet valid."""
    assert credentials.cert_file is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(credentials.cert_file, credentials.key_file)

    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("host", "age", "printed"),
    [("127.0.0.1", 10, "expired on"), ("127.0.0.1", -10, "is not valid before"), ("localhost", 0, "")],
)
async def test_the_fault_of_a_server_certificate_is_named_in_the_error(
    tmp_path: Path, host: str, age: int, printed: str
) -> None:
    authority = Authority.create(tmp_path / "ca", cluster="c", now=NOW - 50 * DAY)
    theirs = issued(authority, tmp_path / "s", Role.COORDINATOR, "s", now=NOW - age * DAY, days=5)
    async with serving(theirs) as port:
        error = await explain(host, port, Credentials(ca_file=theirs.ca_file), tls=True, now=NOW)
    assert error is not None
    assert printed in error.message
    if printed:
        assert isinstance(error, ConfigError)


async def test_a_name_missing_from_a_server_certificate_is_named_in_the_error(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", cluster="c", now=NOW)
    theirs = issued(authority, tmp_path / "m", Role.MEMBER, "m")
    async with serving(theirs) as port:
        error = await explain("127.0.0.1", port, Credentials(ca_file=theirs.ca_file), tls=True, now=NOW)
    assert isinstance(error, ConfigError)
    assert "127.0.0.1" in error.message


async def test_a_closed_port_yields_no_explanation(tmp_path: Path) -> None:
    async with serving(
        issued(Authority.create(tmp_path / "ca", cluster="c", now=NOW), tmp_path / "s", Role.ETCD, "e")
    ) as port:
        pass
    for tls in (True, False):
        assert await explain("127.0.0.1", port, Credentials(), tls=tls, now=NOW) is None
