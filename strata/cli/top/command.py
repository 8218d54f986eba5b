"""`strata top`: the command, and the loop that shows pages."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.console.completion import complete_jobs
from strata.cli.console.credentials import connecting
from strata.cli.console.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Json,
    TimeoutS,
    print_values,
)
from strata.config import Credentials

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from strata.cli.top.reading import Client
    from strata.cli.top.seen import Seen

PLAIN_WIDTH = 120
ATTEMPT_S = 2.0
"""How long all replicas together may take for an answer before the page shows the age of its content."""


@connecting
def top(
    only: Annotated[
        str | None,
        typer.Option("--job", "-j", help="Open this job at once. (the list)", autocompletion=complete_jobs),
    ] = None,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    once: Annotated[bool, typer.Option("--once", help="Print the current state, and end.")] = False,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Show the jobs live, or one of them: progress, goodput, blocking ranks, all ranks, checkpoints.

    If the replica dies, another replica answers. If the output is no terminal, the command prints the current
    state once. ? shows the keys.

    Example: strata top --job gpt
    """
    from strata.cli.top.reading import look  # noqa: PLC0415  # only when it is needed
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(endpoints, timeout_s=timeout_s, credentials=credentials) as client:
        first = look(client.resource, only)
        if as_json:
            print_values(first.as_json())
            return
        screen = console()
        if once or not _is_screen(screen):
            _print(screen, first)
            return
        client.timeout_s = ATTEMPT_S
        raise typer.Exit(live(screen, client, first))


def console() -> Console:
    """Return the console for the output; if the output is no terminal, the width fits all columns."""
    from rich.console import Console  # noqa: PLC0415  # only when it is needed

    found = Console(highlight=False, emoji=False, markup=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        return Console(highlight=False, emoji=False, markup=False, width=PLAIN_WIDTH)
    return found


def _is_screen(console: Console) -> bool:
    """Return whether input and output are a terminal that can show a full screen."""
    return console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty() and sys.stdout.isatty()


def _print(console: Console, seen: Seen) -> None:
    from strata.cli.top.screen import snapshot  # noqa: PLC0415  # only when it is needed

    for each in _encodable(console, snapshot(seen, console.width, now_ms=int(1000 * time.time()))):
        each.rstrip()
        console.print(each, soft_wrap=True)


def _encodable(console: Console, lines: list[Text]) -> list[Text]:
    from strata.observe.bars import ASCII  # noqa: PLC0415  # only when it is needed

    if not console.encoding.lower().startswith("utf"):
        for each in lines:
            each.plain = each.plain.translate(ASCII)
    return lines


def live(console: Console, client: Client, first: Seen) -> int:
    """Show pages until the user quits; return the exit status, 128 + n for signal n."""
    from strata.cli.top.reading import EVERY_S, Reader  # noqa: PLC0415  # only when it is needed
    from strata.cli.top.screen import Size, View, after_key, frame  # noqa: PLC0415  # likewise
    from strata.cli.top.terminal import Ended, Terminal  # noqa: PLC0415  # likewise

    view: View | None = View(job=first.job)
    try:
        with Terminal(console, sys.stdin.fileno()) as terminal:
            reader = Reader(client, first, on_news=terminal.wake)
            reader.start()
            try:
                while view is not None:
                    seen = reader.seen
                    width, height = terminal.size
                    now = frame(
                        view,
                        seen,
                        Size(width=width, height=height),
                        now_s=time.monotonic(),
                        now_ms=int(1000 * time.time()),
                    )
                    terminal.show(_encodable(console, now.lines))
                    view = now.view
                    for key in terminal.keys(EVERY_S):
                        view = after_key(view, key, seen, now.rows)
                        if view is None:
                            break
                    if view is not None:
                        reader.show(view.job, view.rank)
            finally:
                reader.end()
    except Ended as ended:
        return 128 + ended.number
    return 0
