"""Shell completion of names that only a coordinator knows: jobs, datasets, unreachable coordinators.

The user waits while the shell completes, so completion takes at most `_LIMIT_S` for a connection. If no coordinator
answers, it offers nothing and prints no error into the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

from strata.config import ClientConfig
from strata.errors import StrataError

if TYPE_CHECKING:
    from strata.client import CoordinatorClient

_LIMIT_S = 1.0


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs whose names begin with `incomplete`."""
    return _known(context, incomplete, lambda client: (job.name for job in client.jobs()))


def complete_datasets(context: typer.Context, incomplete: str) -> list[str]:
    """Return the job's datasets whose names begin with `incomplete`."""

    def names(client: CoordinatorClient) -> Iterable[str]:
        return (each.name for each in client.datasets())

    return _known(context, incomplete, names)


def complete_coordinators(context: typer.Context, incomplete: str) -> list[str]:
    """Return the unreachable coordinators whose names begin with `incomplete`: no others can be forgotten."""

    def names(client: CoordinatorClient) -> Iterable[str]:
        return (each.replica for each in client.status().replicas if each.unreachable)

    return _known(context, incomplete, names)


def _known(
    context: typer.Context, incomplete: str, names: Callable[[CoordinatorClient], Iterable[str]]
) -> list[str]:
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when it is needed

    options = ("endpoints", "job", "ca_file", "cert_file", "key_file", "token_file", "insecure")
    given = {name: context.params.get(name) for name in options}
    flags = {name if name in {"endpoints", "job"} else f"credentials.{name}": given[name] for name in given}
    try:
        found = ClientConfig.load(flags=flags, env=os.environ, path=context.params.get("config"))
        with CoordinatorClient.connect(
            found.endpoints, job=found.job, timeout_s=_LIMIT_S, credentials=found.credentials
        ) as client:
            return [name for name in names(client) if name.startswith(incomplete)]
    except StrataError:
        return []
