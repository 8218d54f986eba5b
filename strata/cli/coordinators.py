"""`strata coordinators`: list the coordinators, and forget one that will not come back."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from strata.cli.console.completion import complete_coordinators
from strata.cli.console.credentials import connecting
from strata.cli.console.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Json,
    TimeoutS,
    print_json,
    print_values,
    printable,
)
from strata.cli.status import show_coordinators
from strata.config import Credentials

app = typer.Typer(help="List the coordinators, and forget one that will not come back.", no_args_is_help=True)


@app.command("list")
@connecting
def list_coordinators(
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """List the coordinators: those that run, and those that are unreachable.

    Example: strata coordinators list
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(endpoints, timeout_s=timeout_s, credentials=credentials) as client:
        status = client.status()
    if as_json:
        print_json(status.replicas)
    else:
        show_coordinators(status)


@app.command("forget")
@connecting
def forget_coordinator(
    name: Annotated[
        str, typer.Argument(help="The coordinator's name.", autocompletion=complete_coordinators)
    ],
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Remove from the list an unreachable coordinator that will not come back.

    A running coordinator is refused. If a coordinator starts again under this name, the list has it again.

    Example: strata coordinators forget coordinator-2
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it
    from strata.v1.admin_pb2 import ForgetCoordinatorRequest  # noqa: PLC0415  # likewise

    with CoordinatorClient.connect(endpoints, timeout_s=timeout_s, credentials=credentials) as client:
        client.call(ForgetCoordinatorRequest(replica=name))
    if as_json:
        print_values({"forgotten": name})
        return
    sys.stdout.write(f"coordinator {printable(name)} is forgotten\n")
