"""`strata dev`: a whole control plane in one terminal."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from strata.cli.console.extras import check_server
from strata.errors import Unavailable

if TYPE_CHECKING:
    from strata.devcluster.local_cluster import LocalCluster

_POLL_S = 0.5


def dev(
    etcd_members: Annotated[int, typer.Option("--etcd-members", help="etcd members to start: 1 or 3.")] = 1,
    coordinators: Annotated[
        int, typer.Option("--coordinators", "-n", min=1, max=9, help="Coordinators to start.")
    ] = 1,
    port: Annotated[
        int,
        typer.Option(
            "--port", min=1, max=65_526, help="The first coordinator's port; the others take the next ones."
        ),
    ] = 50051,
    http_port: Annotated[
        int,
        typer.Option(
            "--http-port",
            min=1,
            max=65_526,
            help="The first status page's port; a taken one is replaced by a free one.",
        ),
    ] = 8080,
    data: Annotated[Path, typer.Option("--data", help="Where etcd's data and the logs are kept.")] = Path(
        ".strata/dev"
    ),
    etcd: Annotated[
        Path | None,
        typer.Option("--etcd", help="The etcd program to use. [STRATA_ETCD, .tools, PATH]"),
    ] = None,
    cluster: Annotated[str, typer.Option("--cluster", help="The cluster's name.")] = "default",
    detect_s: Annotated[
        float, typer.Option("--detect-s", help="Seconds within which a frozen host is found.")
    ] = 5.0,
) -> None:
    """Run etcd and coordinators on this machine until Ctrl-C; nothing is left running after it.

    Example: strata dev --etcd-members 3 --coordinators 3
    """
    check_server()  # otherwise each coordinator would fail, and report the reason only in its log
    # imported here, so that other commands do not load these modules
    from strata.core.timing import Timing  # noqa: PLC0415
    from strata.devcluster.etcd_binary import find_etcd  # noqa: PLC0415
    from strata.devcluster.local_cluster import LocalCluster  # noqa: PLC0415
    from strata.devcluster.ports import free_port, is_free  # noqa: PLC0415

    Timing.derive(detect_s)  # report an invalid setting now; otherwise every coordinator would fail later

    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        binary = find_etcd(flag=etcd, members=etcd_members)
        if binary.warning:
            console.print(f"warning: {binary.warning}", style="yellow", markup=False)
        with LocalCluster.start(
            data,
            etcd_members=etcd_members,
            coordinators=coordinators,
            binary=binary,
            ports=[port + i for i in range(coordinators)],
            http_ports=[
                page if is_free(page) else free_port() for page in range(http_port, http_port + coordinators)
            ],
            cluster=cluster,
            detect_s=detect_s,
            say=console.print,
        ) as local:
            console.print(f"\nendpoints: [bold]{local.endpoints}[/bold]")
            console.print(f"status page: http://{local.coordinators[0].http}/")
            console.print(f"logs and data: {data}")
            console.print(f"try: strata status --endpoints {local.endpoints}")
            console.print("Ctrl-C ends everything.\n")
            _watch(local, console)
    except KeyboardInterrupt:
        console.print("stopped")


def _watch(local: LocalCluster, console: Console) -> None:
    """Report each process that ends, until Ctrl-C; raise `Unavailable` when no process is left."""
    children = {c.name: c.child for c in local.coordinators}
    children |= {m.name: m.child for m in local.etcd.members}
    running = dict(children)
    while running:
        for name, child in list(running.items()):
            if child.poll() is not None:
                del running[name]
                console.print(f"[red]{name} {child.describe()}[/red]")
        time.sleep(_POLL_S)
    raise Unavailable("every process has ended", hint=f"the logs are in {local.logs}")
