"""`strata controlplane`: backups of the coordinators' keys in etcd."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli.console.credentials import Config, Insecure
from strata.cli.console.output import Json, age, print_table, print_values, size
from strata.cli.console.progress import byte_progress
from strata.cli.controlplane.restore import rebuild, restore
from strata.config import CoordinatorConfig

if TYPE_CHECKING:
    from strata.controlplane.backup import MadeBackup
    from strata.controlplane.backup_store import StoredBackup

app = typer.Typer(
    help="Back up the control plane, restore it, or rebuild it from storage.", no_args_is_help=True
)

Place = Annotated[
    str, typer.Argument(help="Where backups lie: a folder, or s3://bucket/prefix.", metavar="PLACE")
]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Only backups of this cluster.")]


@app.command()
def backup(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            envvar="STRATA_BACKUP_TO",
            help="Where to keep it: a folder, or s3://bucket/prefix.",
            metavar="PLACE",
        ),
    ],
    keep: Annotated[
        int,
        typer.Option(
            "--keep", envvar="STRATA_BACKUP_KEEP", min=1, help="How many backups of this cluster stay."
        ),
    ] = 48,
    etcd: Annotated[
        str | None, typer.Option("--etcd", help="etcd's members, as host:port, by commas.")
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="The cluster's name. [default]")] = None,
    insecure: Insecure = None,
    config: Config = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="Seconds for each request to etcd.")
    ] = 5.0,
    as_json: Json = False,
) -> None:
    """Take a snapshot of etcd from a healthy member, and store it with a .json that describes it.

    A backup counts once its .json is written. Then the oldest backups are removed, so that --keep stay. Run it
    from a timer: docs/operate/backup.md.

    Example: strata controlplane backup --to /mnt/backups --etcd host1:2379,host2:2379,host3:2379
    """
    from strata.cli.etcd.access import open_store  # noqa: PLC0415  # grpc, which not every command needs
    from strata.controlplane.backup import back_up  # noqa: PLC0415  # likewise
    from strata.controlplane.places import open_place  # noqa: PLC0415  # likewise

    flags = {"etcd.endpoints": etcd, "cluster": cluster, "credentials.insecure": insecure}
    settings = CoordinatorConfig.load(flags=flags, env=os.environ, path=config)
    place = open_place(to)
    # If systemd stops the backup, the command must clean up as after Ctrl-C. So SIGTERM raises SIGINT, whose handler
    # in asyncio cancels the task. An exception raised in this handler might be lost in a callback of gRPC.
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
    made = back_up(
        lambda: open_store(settings.etcd, timeout_s=timeout_s),
        place,
        cluster=settings.cluster,
        keep=keep,
        strata_version=metadata.version("strata-control"),
        now=_now,
        progress=byte_progress,
    )
    if as_json:
        print_values(_made_as_values(made, place.uri))
    else:
        _show_made(made, place.uri, keep)
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)


@app.command()
def backups(place: Place, cluster: Cluster = None, as_json: Json = False) -> None:
    """List the backups in a place, newest first. Unfinished backups are left out.

    Example: strata controlplane backups /mnt/backups
    """
    from strata.controlplane.backup_store import list_backups  # noqa: PLC0415  # likewise
    from strata.controlplane.places import open_place  # noqa: PLC0415  # slow to import

    where = open_place(place)
    found = list_backups(where, cluster=cluster)
    if as_json:
        print_values([_as_values(backup) for backup in found])
        return
    print_table(
        where.uri,
        ("TIME", "AGE", "CLUSTER", "REVISION", "SIZE", "ETCD", "NAME"),
        _rows(found, _now()),
        empty=f"no backup in {where.uri}",
    )


@app.command()
def verify(
    place: Place,
    name: Annotated[
        str, typer.Option("--name", help="A backup, as `backups` names it; newest: the newest that counts.")
    ] = "newest",
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Read a backup once, and report whether it is intact: exit status 0 if it is, 1 if not.

    The backup's size and SHA-256 must match its .json. Its content must match the SHA-256 that etcd wrote at its end.

    Example: strata controlplane verify /mnt/backups
    """
    from strata.controlplane.backup_store import find_metadata, newest_backup, verify_backup  # noqa: PLC0415
    from strata.controlplane.metadata import BackupCorrupt  # noqa: PLC0415  # slow to import
    from strata.controlplane.names import parse_stem  # noqa: PLC0415  # likewise
    from strata.controlplane.places import open_place  # noqa: PLC0415  # likewise

    where = open_place(place)
    chosen = newest_backup(where, cluster=cluster) if name == "newest" else parse_stem(name)
    try:
        described = find_metadata(where, chosen)
        with byte_progress(f"reading {chosen.stem}", described.size_bytes) as advance:
            verify_backup(where, chosen, advance=advance, described=described)
    except BackupCorrupt as error:
        if not as_json:
            raise
        print_values({"name": chosen.stem, "whole": False, "reason": error.message})
        raise typer.Exit(1) from None
    if as_json:
        print_values({"name": chosen.stem, "whole": True, "reason": ""})
        return
    typer.echo(f"{chosen.stem} is whole: {size(described.size_bytes)}, SHA-256 {described.sha256}")


def _now() -> datetime:
    return datetime.now(UTC)


def _show_made(made: MadeBackup, uri: str, keep: int) -> None:
    recorded = made.metadata
    typer.echo(f"{made.name.stem} is in {uri}")
    typer.echo(
        f"cluster {recorded.cluster}, revision {recorded.revision} or later, {size(recorded.size_bytes)};"
        f" {made.reason} (etcd {recorded.etcd_version})"
    )
    if made.removed_backups:
        typer.echo(f"removed {made.removed_backups} older; the newest {keep} stay")


def _made_as_values(made: MadeBackup, uri: str) -> dict[str, Any]:
    return {
        "name": made.name.stem,
        "where": uri,
        **_metadata_as_values(asdict(made.metadata)),
        "reason": made.reason,
        "removed": [file.name for file in made.removed],
        "warnings": list(made.warnings),
    }


def _as_values(backup: StoredBackup) -> dict[str, Any]:
    recorded = {} if backup.metadata is None else _metadata_as_values(asdict(backup.metadata))
    named = {"cluster": backup.name.cluster, "revision": backup.name.revision}
    return {
        "name": backup.name.stem,
        "time": backup.name.time.isoformat(),
        "size_bytes": backup.size_bytes,
        **named,
        **recorded,
        "counts": not backup.fault,
        "fault": backup.fault,
    }


def _metadata_as_values(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "time": fields["time"].isoformat()}


def _rows(found: Sequence[StoredBackup], now: datetime) -> list[Sequence[object]]:
    return [
        (
            f"{each.name.time:%Y-%m-%d %H:%M:%SZ}",
            age(max(0.0, (now - each.name.time).total_seconds()) * 1000),
            each.name.cluster,
            each.name.revision,
            size(each.size_bytes),
            each.metadata.etcd_version if each.metadata is not None else "-",
            each.name.stem + (f" ({each.fault})" if each.fault else ""),
        )
        for each in found
    ]


app.command()(restore)
app.command()(rebuild)
