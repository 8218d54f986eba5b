"""`strata doctor`: checks of this machine and the cluster, with a remedy for each fault."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from strata.cli.console.credentials import connecting
from strata.cli.console.exits import Exit
from strata.cli.console.output import DEFAULT_ENDPOINTS, Endpoints, Json, print_values, printable
from strata.config import CoordinatorConfig, Credentials
from strata.errors import StrataError

if TYPE_CHECKING:
    from strata.cli.checks.finding import Finding

_COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@connecting
def doctor(
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    etcd: Annotated[
        str | None,
        typer.Option(
            "--etcd", help="Check these etcd members, too: on a coordinator's host. (those of the file)"
        ),
    ] = None,
    storage: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            "-s",
            help="Where checkpoints go, as a path or URI; may be repeated. Checks features, free space and owner.",
            metavar="ROOT",
        ),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Leave a mark in each folder of --storage for an hour, and look for the marks of other hosts.",
        ),
    ] = False,
    as_json: Json = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="Seconds for each request over the network.")
    ] = 3.0,
    *,
    config: Path | None = None,
    credentials: Credentials,
) -> None:
    """Check this machine and the cluster it reaches; print a remedy for each fault.

    It writes only small files below --storage, and removes them; with --shared one file stays for an hour. The
    exit status is 1 when a line says FAIL; WARN is no failure.

    Example: strata doctor --etcd 127.0.0.1:2379 --storage /mnt/checkpoints
    """
    from strata.cli.checks import certificates, coordinators, machine  # noqa: PLC0415  # grpc, which not every command needs
    from strata.cli.checks import etcd as etcd_checks  # noqa: PLC0415  # likewise
    from strata.cli.checks import storage as storage_checks  # noqa: PLC0415  # likewise
    from strata.cli.etcd.remedies import UNKNOWN, Connection  # noqa: PLC0415  # likewise

    roots = tuple(storage or ())
    findings = [
        *machine.machine(),
        machine.clock(),
        *machine.names(endpoints, timeout_s=timeout_s),
        machine.fork(),
        machine.server_extra(),
        *certificates.credentials(credentials),
        *certificates.servers(endpoints, credentials, timeout_s=timeout_s),
    ]
    for root in roots:
        findings += storage_checks.storage(root, marking=shared)
    members = _etcd_members(etcd, credentials, config)
    findings += coordinators.cluster(
        endpoints,
        credentials,
        timeout_s=timeout_s,
        alone=members is None,
        connection=Connection.of(members, config) if members is not None else UNKNOWN,
        roots=roots,
    )
    if members is not None:
        own = Credentials(
            ca_file=members.etcd.ca_file, cert_file=members.etcd.cert_file, key_file=members.etcd.key_file
        )
        findings += certificates.credentials(own, what="etcd tls")
        findings += etcd_checks.etcd(members, file=config, timeout_s=timeout_s, roots=roots)
        findings += etcd_checks.ports(members)
    if as_json:
        print_values([asdict(finding) for finding in findings])
    else:
        _show(findings)
    if any(finding.level == "FAIL" for finding in findings):
        raise typer.Exit(Exit.FAILURE)


def _etcd_members(etcd: str | None, own: Credentials, file: Path | None) -> CoordinatorConfig | None:
    """Return the configuration for etcd if a flag, the environment or the file names etcd's members, else None."""
    try:
        flags = {"etcd.endpoints": etcd, "credentials.insecure": own.insecure or None}
        config = CoordinatorConfig.load(flags=flags, env=os.environ, path=file)
    except StrataError:
        if etcd is not None:
            raise
        return None  # a file for clients: errors in its coordinator part do not matter here
    named = etcd is not None or config.etcd.endpoints != CoordinatorConfig().etcd.endpoints
    return config if named else None


def _show(findings: list[Finding]) -> None:
    console = Console(highlight=False, emoji=False)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        colour = _COLOURS[finding.level]
        console.print(f"[{colour}]{finding.level:<4}[/{colour}]  {finding.what:<{width}}  ", end="")
        console.print(printable(finding.says), markup=False, soft_wrap=True)
        if finding.hint:
            console.print(
                " " * (width + 8) + printable(finding.hint), markup=False, soft_wrap=True, style="italic"
            )
        for command in finding.commands:
            console.print(" " * (width + 8) + printable(command), markup=False, soft_wrap=True)
