"""`strata certs`: a certificate authority for one cluster, and the certificates it signs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli.console.output import Json, print_values
from strata.core.access.authority import Role
from strata.errors import ConfigError

if TYPE_CHECKING:
    from strata.security.certificates import Described

app = typer.Typer(help="Make and look at certificates.", no_args_is_help=True)

Authority = Annotated[Path, typer.Option("--ca", help="The authority's folder, made by `strata certs ca`.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]


@app.command()
def ca(
    out: Annotated[Path, typer.Option("--out", help="The folder to write ca.pem and ca-key.pem to.")],
    cluster: Annotated[
        str, typer.Option("--cluster", help="The cluster whose members it will sign.")
    ] = "default",
    days: Annotated[int, typer.Option("--days", help="How long it is valid.")] = 3650,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make an authority. Keep its key where no coordinator and no trainer runs.

    Example: strata certs ca --out ./ca --cluster default
    """
    _need_library()
    from strata.security import certificates  # noqa: PLC0415  # the server extra

    made = certificates.Authority.create(out, cluster=cluster, now=datetime.now(UTC), days=days, force=force)
    if as_json:
        found = certificates.describe(out / certificates.CA)
        print_values(_as_values(out, found, found.days_left(datetime.now(UTC))))
        return
    end = made.certificate.not_valid_after_utc
    typer.echo(f"{out / certificates.CA}: the authority of cluster {cluster}, until {end:%Y-%m-%d}")
    typer.echo(f"{out / certificates.CA_KEY}: its key; anyone who has it can sign any identity")


@app.command()
def issue(
    authority: Authority,
    role: Annotated[Role, typer.Option("--role", help="Its role.")],
    id: Annotated[  # noqa: A002  # the option's name
        str, typer.Option("--id", help="Its identity: a member's worker id, a coordinator's name.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder for cert.pem, key.pem and ca.pem.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address that others connect to; may be repeated."),
    ] = None,
    job: Annotated[
        list[str] | None, typer.Option("--job", help="A job to which it is limited; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option("--days", help="How long it is valid.")] = 365,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Sign a certificate for a coordinator, a member, an operator, a viewer or an etcd member.

    Example: strata certs issue --ca ./ca --role coordinator --id c1 --host host1 --out ./c1
    """
    _need_library()
    from strata.security import certificates  # noqa: PLC0415  # the server extra

    made = certificates.Authority.open(authority).issue(
        out, role=role, id=id, hosts=host or (), jobs=job or (), now=datetime.now(UTC), days=days, force=force
    )
    _print_issued(out, made, as_json=as_json)


@app.command()
def renew(
    authority: Authority,
    out: Annotated[Path, typer.Option("--out", help="The folder whose certificate is replaced.")],
    days: Annotated[
        int | None, typer.Option("--days", help="How long it is valid. (as long as the old one)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replace a certificate by a new one for the same identity, hosts and jobs, with a new key.

    Processes use the new certificate from their next connection on; no process has to be restarted.

    Example: strata certs renew --ca ./ca --out ./c1
    """
    _need_library()
    from strata.security import certificates  # noqa: PLC0415  # the server extra

    made = certificates.Authority.open(authority).renew(out, now=datetime.now(UTC), days=days)
    _print_issued(out, made, as_json=as_json)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A certificate, or a folder that holds cert.pem or ca.pem.")],
    as_json: Json = False,
) -> None:
    """Show a certificate's identity, its hosts, and when it expires.

    Example: strata certs show ./c1
    """
    _need_library()
    from strata.security import certificates  # noqa: PLC0415  # the server extra

    if path.is_dir():
        names = [name for name in (certificates.CERT, certificates.CA) if (path / name).exists()]
        path = path / (names[0] if names else certificates.CERT)
    found = certificates.describe(path)
    left = found.days_left(datetime.now(UTC))
    if as_json:
        print_values(_as_values(path, found, left))
        return
    whose = found.identity.uri if found.identity is not None else "no identity of Strata's"
    rows = [
        ("certificate", str(path)),
        ("identity", "an authority" if found.authority else whose),
        ("jobs", ", ".join(sorted(found.identity.jobs)) if found.identity and found.identity.jobs else "all"),
        ("hosts", ", ".join(found.hosts) or "none"),
        ("issuer", found.issuer),
        ("valid from", f"{found.not_before:%Y-%m-%d %H:%M:%SZ}"),
        ("valid until", f"{found.not_after:%Y-%m-%d %H:%M:%SZ} ({_left(left)})"),
        ("serial", found.serial),
        ("sha256", found.fingerprint),
    ]
    for name, value in rows:
        typer.echo(f"{name:<12} {value}")


def _as_values(path: Path, found: Described, days_left: float) -> dict[str, Any]:
    identity = found.identity
    return {
        "path": str(path),
        "identity": identity.uri if identity is not None else None,
        "role": str(identity.role) if identity is not None else None,
        "jobs": sorted(identity.jobs) if identity is not None else [],
        "authority": found.authority,
        "hosts": list(found.hosts),
        "subject": found.subject,
        "issuer": found.issuer,
        "not_before": found.not_before.isoformat(),
        "not_after": found.not_after.isoformat(),
        "days_left": round(days_left, 2),
        "serial": found.serial,
        "sha256": found.fingerprint,
    }


def _print_issued(out: Path, made: Described, *, as_json: bool) -> None:
    if as_json:
        print_values(_as_values(out, made, made.days_left(datetime.now(UTC))))
        return
    identity = made.identity
    assert identity is not None
    typer.echo(f"{out}: {identity.uri}, until {made.not_after:%Y-%m-%d %H:%M:%SZ}")
    if made.hosts:
        typer.echo(f"hosts: {', '.join(made.hosts)}")


def _left(days: float) -> str:
    if days < 0:
        return f"EXPIRED {-days:.0f} days ago" if days <= -1 else "EXPIRED"
    return f"{days:.0f} days left" if days >= 2 else f"{days * 24:.1f} hours left"


def _need_library() -> None:
    try:
        import cryptography  # noqa: F401, PLC0415  # only to say in our words that it is absent
    except ImportError:
        raise ConfigError(
            "certificates are made with the library `cryptography`, which is not installed",
            hint='pip install "strata-control[server]"',
        ) from None
