"""`strata coordinator`: run one replica of the control plane."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.console.credentials import TlsCaFile, TlsCertFile, TlsKeyFile, TokenFile
from strata.cli.console.extras import check_server
from strata.config import CoordinatorConfig, split_address

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from strata.coordinator.access.connection_limiter import ConnectionReport
    from strata.coordinator.replica import PageFactory, ResourceFactory
    from strata.coordinator.suspended import SuspendedPage
    from strata.dashboard.server import HttpServer


def coordinator(
    etcd: Annotated[
        str | None, typer.Option("--etcd", help="etcd's members, as host:port, by commas.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", help="Where to serve clients and peers. [127.0.0.1:50051]"),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", help="The address for others to connect to, if not the listen address."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http", help='Where to serve the status page and /metrics; "" for nowhere. [127.0.0.1:8080]'
        ),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option("--replica", help="This replica's name. (its certificate's id, else host-port)"),
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="The cluster's name.")] = None,
    detect_s: Annotated[
        float | None,
        typer.Option("--detect-s", help="Seconds within which a frozen host is found. [5]"),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Serve plaintext on an address that is not loopback."),
    ] = None,
    tls_ca_file: TlsCaFile = None,
    tls_cert_file: TlsCertFile = None,
    tls_key_file: TlsKeyFile = None,
    accepted_tokens_file: Annotated[
        Path | None,
        typer.Option("--accepted-tokens-file", help="Hashes of tokens to accept, by `strata tokens add`."),
    ] = None,
    token_file: TokenFile = None,
    log_format: Annotated[str | None, typer.Option("--log-format", help="auto, json or plain.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file.")] = None,
) -> None:
    """Run one coordinator until SIGTERM or SIGINT; three of them make the control plane.

    Example: strata coordinator --etcd e1:2379,e2:2379,e3:2379 --listen 127.0.0.1:50051
    """
    check_server()
    from strata.coordinator.main import serve  # noqa: PLC0415  # the server extra

    flags = {
        "etcd.endpoints": etcd,
        "listen": listen,
        "advertise": advertise,
        "http_listen": http,
        "replica": replica,
        "cluster": cluster,
        "detect_s": detect_s,
        "credentials.ca_file": tls_ca_file,
        "credentials.cert_file": tls_cert_file,
        "credentials.key_file": tls_key_file,
        "credentials.token_file": token_file,
        "credentials.insecure": insecure,
        "accepted_tokens_file": accepted_tokens_file,
        "log.format": log_format,
    }
    settings = CoordinatorConfig.load(flags=flags, env=os.environ, path=config)
    serve(settings, page_factory(settings), resource_factory(settings), suspended_page_factory(settings))


def resource_factory(config: CoordinatorConfig) -> ResourceFactory:
    """Return the factory for the object that answers gRPC requests for resources of the HTTP API."""
    from strata.dashboard.api.resources import Resources  # noqa: PLC0415  # the server extra

    return lambda observed: Resources(observed).reader(config.cluster)


def page_factory(config: CoordinatorConfig) -> PageFactory | None:
    """Return the factory for a replica's HTTP server; None if HTTP is switched off."""
    if not config.http_listen:
        return None
    from strata.dashboard.app import make_app  # noqa: PLC0415  # the server extra
    from strata.dashboard.authorizer import HttpAuthorizer  # noqa: PLC0415  # likewise

    authorizer = HttpAuthorizer(config, now=lambda: dt.datetime.now(dt.UTC))
    return lambda observed: _http_server(
        config, make_app(observed, authorizer=authorizer), observed.connections
    )


def suspended_page_factory(config: CoordinatorConfig) -> SuspendedPage | None:
    """Return the factory for a suspended replica's HTTP server; None if HTTP is switched off."""
    if not config.http_listen:
        return None
    from strata.coordinator.access.connection_limiter import ConnectionReport  # noqa: PLC0415  # the server extra
    from strata.dashboard.suspended import make_suspended_app  # noqa: PLC0415  # likewise

    return lambda reason: _http_server(config, make_suspended_app(reason), ConnectionReport())


def _http_server(config: CoordinatorConfig, app: ASGIApp, report: ConnectionReport) -> HttpServer:
    from strata.coordinator.access.connection_limiter import connection_shares  # noqa: PLC0415  # the server extra
    from strata.dashboard.server import HttpServer  # noqa: PLC0415  # likewise

    advertised, _port = split_address("coordinator.advertise", config.advertise or config.listen)
    tls = None
    if config.serves_https:
        from strata.dashboard.tls import server_context  # noqa: PLC0415  # likewise

        own = config.credentials
        assert own.cert_file is not None
        assert own.key_file is not None
        tls = server_context(own.cert_file, own.key_file, own.ca_file)
    return HttpServer(
        app,
        config.http_listen,
        advertised_host=advertised,
        shares=connection_shares(config),
        report=report,
        tls=tls,
    )
