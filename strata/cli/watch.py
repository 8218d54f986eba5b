"""`strata watch`: a job's keys, and their changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli.console.credentials import connecting
from strata.cli.console.output import DEFAULT_ENDPOINTS, Endpoints, Job, Json, printable
from strata.config import Credentials

if TYPE_CHECKING:
    from strata.v1.watch_pb2 import KeyEvent


@connecting
def watch(
    prefix: Annotated[
        str, typer.Argument(help="Only keys that begin with this: workers/, barriers/, latest. (all)")
    ] = "",
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    job: Job = "default",
    as_json: Json = False,
    once: Annotated[bool, typer.Option("--once", help="Print the current keys, and end.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="Seconds without a coordinator before giving up.")
    ] = 30.0,
    *,
    credentials: Credentials,
) -> None:
    """Print a job's present keys, and every change of them, until Ctrl-C.

    Changes come in order and without gaps, even if the coordinator that serves them dies. With --json each line
    is one document.

    Example: strata watch --job gpt checkpoints/
    """
    from strata.client.api.watch import watch as watched  # noqa: PLC0415  # likewise
    from strata.session.endpoints import parse_endpoints  # noqa: PLC0415  # grpc only when it is needed

    where = parse_endpoints(endpoints, credentials)

    async def printed() -> None:
        events = watched(
            where,
            random.Random(),
            job=job,
            prefix=prefix,
            timeout_s=timeout_s,
            credentials=credentials,
        )
        async with contextlib.aclosing(events) as responses:
            async for response in responses:
                for event in response.events:
                    sys.stdout.write((_document(event) if as_json else _line(event)) + "\n")
                sys.stdout.flush()
                if once:
                    return

    asyncio.run(printed())


def _document(event: KeyEvent) -> str:
    return json.dumps(
        {
            "key": event.key,
            "value": _value(event),
            "deleted": event.deleted,
            "create_revision": event.create_revision,
            "mod_revision": event.mod_revision,
        }
    )


def _value(event: KeyEvent) -> Any:
    """Return the value's JSON; text if it is not JSON, None if it is empty."""
    try:
        return json.loads(event.value)
    except ValueError:
        return event.value.decode(errors="replace") or None


def _line(event: KeyEvent) -> str:
    what = "deleted" if event.deleted else event.value.decode(errors="replace")
    return printable(f"{event.mod_revision:>8}  {event.key}  {what}")
