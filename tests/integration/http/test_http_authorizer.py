"""The status page on a non-loopback address: TLS, authorization, and a certificate replaced while it serves."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from strata.config import CoordinatorConfig, Credentials
from strata.coordinator.access.connection_limiter import ConnectionReport
from strata.core.access.authority import Role
from strata.core.access.connection_limits import shares
from strata.dashboard.app import make_app
from strata.dashboard.authorizer import HttpAuthorizer
from strata.dashboard.server import HttpServer
from strata.dashboard.tls import server_context
from strata.errors import ConfigError
from strata.security.tokens import TokenFile
from tests.certificates import Authority
from tests.processes import LIMIT_S
from tests.unit.dashboard.rig import Shown

LISTEN = "0.0.0.0:0"
SHARES = shares(descriptors=4096, most=1000, per_address=1000)


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def config_of(authority: Authority, *, tokens: Path | None = None) -> CoordinatorConfig:
    cert, key = authority.issue("server", uris=("strata://default/coordinator/r1",))
    return CoordinatorConfig(
        http_listen=LISTEN,
        accepted_tokens_file=tokens,
        credentials=Credentials(ca_file=authority.ca, cert_file=cert, key_file=key, token_file=tokens),
    )


@asynccontextmanager
async def served(config: CoordinatorConfig) -> AsyncIterator[str]:
    """Serve a replica's page as `strata coordinator` does; yield its URL."""
    own = config.credentials
    assert own.cert_file is not None
    assert own.key_file is not None
    shown = Shown()
    shown.lead()
    shown.job("job", members=1)
    server = HttpServer(
        make_app(shown, authorizer=HttpAuthorizer(config, now=now)),
        LISTEN,
        advertised_host="127.0.0.1",
        shares=SHARES,
        report=ConnectionReport(),
        tls=server_context(own.cert_file, own.key_file, own.ca_file),
    )
    url = await server.start()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run())
        yield url
        await server.stop()


async def ask(
    url: str, authority: Authority, client: tuple[Path, Path] | None = None, **headers: str
) -> tuple[int, str, str]:
    """Return the status code, the body, and the WWW-Authenticate header of a refusal."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    if client is not None:
        context.load_cert_chain(*client)

    def fetch() -> tuple[int, str, str]:
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        try:
            with opener.open(urllib.request.Request(url, headers=headers), timeout=LIMIT_S) as answer:
                return answer.status, answer.read().decode(), ""
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers.get("www-authenticate", "")

    return await asyncio.to_thread(fetch)


async def test_only_certificates_of_the_cluster_may_read_the_status(authority: Authority) -> None:
    viewer = authority.issue("viewer", uris=("strata://default/viewer/ann",))
    etcd = authority.issue("an-etcd", uris=("strata://default/etcd/e1",))
    stranger = authority.issue("stranger", uris=("strata://other/viewer/ann",))
    limited = authority.issue("limited", uris=("strata://default/viewer/bob", "strata://default/job/another"))
    async with served(config_of(authority)) as url:
        assert url.startswith("https://127.0.0.1:")
        assert (await ask(f"{url}/status", authority, viewer))[0] == 200
        assert (await ask(f"{url}/status/job", authority, viewer))[0] == 200
        assert (await ask(f"{url}/status", authority))[0] == 401
        for nobody in (etcd, stranger):
            for path in ("/status", "/status/job", "/api/v1/cluster", "/metrics"):
                assert (await ask(url + path, authority, nobody))[0] == 403
        assert (await ask(f"{url}/status/another", authority, limited))[0] == 404
        for path in (
            "/status/job",
            "/api/v1/jobs/job",
            "/status/j%6Fb",
            "/status",
            "/metrics",
        ):
            assert (await ask(url + path, authority, limited))[0] == 403
        assert (await ask(f"{url}/api/v1/cluster", authority, limited))[0] == 200, "as GetStatus over gRPC"
        for path in ("/healthz", "/readyz"):
            assert (await ask(url + path, authority))[0] == 200


async def test_a_token_is_accepted_as_bearer_or_as_a_password(authority: Authority, tmp_path: Path) -> None:
    accepted = tmp_path / "tokens.json"
    _entry, token = TokenFile(accepted).add(role=Role.VIEWER, id="ann", jobs=(), now=now(), days=None)
    basic = base64.b64encode(f"anybody:{token}".encode()).decode()
    async with served(config_of(authority, tokens=accepted)) as url:
        assert (await ask(f"{url}/status", authority, Authorization=f"Bearer {token}"))[0] == 200
        assert (await ask(f"{url}/status", authority, Authorization=f"Basic {basic}"))[0] == 200
        for wrong in ("Bearer x", "Basic x", "Basic eA==", "Digest x", ""):
            code, body, asks = await ask(f"{url}/status", authority, Authorization=wrong)
            assert code == 401
            assert token not in body
            assert asks.startswith("Basic")


async def test_a_certificate_that_is_replaced_is_shown_at_once(authority: Authority) -> None:
    config = config_of(authority)
    own = config.credentials
    async with served(config) as url:

        async def serial() -> str:
            host, port = url.removeprefix("https://").rsplit(":", 1)
            return await asyncio.to_thread(
                ssl.get_server_certificate, (host, int(port)), ca_certs=str(authority.ca), timeout=LIMIT_S
            )

        before = await serial()
        assert await serial() == before
        cert, key = authority.issue("newer", uris=("strata://default/coordinator/r1",))
        assert own.cert_file is not None
        assert own.key_file is not None
        own.key_file.write_bytes(key.read_bytes())
        own.cert_file.write_bytes(cert.read_bytes())
        assert await serial() != before


def test_a_file_that_is_not_a_certificate_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(ConfigError, match="cannot use"):
        server_context(tmp_path / "x", tmp_path / "x", None)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_on_loopback_no_credentials_are_required(authority: Authority, listen: str) -> None:
    cert, key = authority.issue("server")
    config = CoordinatorConfig(
        http_listen=listen, credentials=Credentials(ca_file=authority.ca, cert_file=cert, key_file=key)
    )
    assert HttpAuthorizer(config, now=now).caller({"headers": []}) is None
    assert not config.serves_https


async def test_connections_that_are_held_open_keep_no_probe_out(authority: Authority) -> None:
    async with served(config_of(authority)) as url:
        host, port = url.removeprefix("https://").rsplit(":", 1)
        context = ssl.create_default_context(cafile=str(authority.ca))
        held = [
            await asyncio.open_connection(host, int(port), ssl=context)
            for _ in range(SHARES.http_speaking.most)
        ]
        for path in ("/readyz", "/healthz"):
            assert (await ask(url + path, authority))[0] == 200
        for _reader, writer in held:
            writer.transport.abort()
