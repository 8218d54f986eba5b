"""`strata etcd`: the health of etcd's members, and the commands that repair them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from strata.cli.console.exits import Exit
from strata.cli.console.interrupts import INTERRUPTED, interruptible
from strata.cli.console.output import Json, print_table, print_values, printable, size
from strata.cli.etcd.remedies import Connection
from strata.config import CoordinatorConfig
from strata.core.leadership.etcd_quorum import quorum_sentence
from strata.errors import StrataError, Unavailable

if TYPE_CHECKING:
    from strata.cli.etcd.replace_member import Replacement
    from strata.cli.etcd.view import Note
    from strata.etcd import EtcdStore

# strata.etcd imports grpc, which not every command needs: a command imports strata.etcd when it runs

app = typer.Typer(help="Show etcd's members, and repair them.", no_args_is_help=True)

CONNECT_S: Final = 5.0
"""How long commands that change etcd wait for the first member that answers."""
CHANGE_S: Final = 30.0
"""How long etcd may take to remove a member and to add another member."""

Etcd = Annotated[
    str | None, typer.Option("--etcd", help="etcd's members, as host:port, by commas. (those of the file)")
]
Config = Annotated[Path | None, typer.Option("--config", help="A coordinator's TOML file.")]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Speak plaintext on addresses that are not loopback.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """The configuration for etcd, and the options that a printed command needs to reach the same etcd."""

    config: CoordinatorConfig
    connection: Connection

    async def open(self, timeout_s: float = CONNECT_S) -> EtcdStore:
        from strata.cli.etcd.access import open_store  # noqa: PLC0415

        return await open_store(self.config.etcd, timeout_s=timeout_s)


def _reached(etcd: str | None, config: Path | None, insecure: bool | None) -> _Reached:
    flags = {"etcd.endpoints": etcd, "credentials.insecure": insecure}
    found = CoordinatorConfig.load(flags=flags, env=os.environ, path=config)
    return _Reached(config=found, connection=Connection.of(found, config))


@app.command()
def status(
    etcd: Etcd = None,
    config: Config = None,
    insecure: Insecure = None,
    as_json: Json = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="Seconds for each request to a member.")
    ] = 3.0,
) -> None:
    """Show each member of etcd, its quorum, and the commands that repair it.

    The exit status is 1 if an alarm is on, a voter is not healthy, or there is no leader.

    Example: strata etcd status --etcd e1:2379,e2:2379,e3:2379
    """
    from strata.cli.etcd import view  # noqa: PLC0415

    reached = _reached(etcd, config, insecure)

    async def looked() -> view.ClusterState:
        async with await reached.open(timeout_s) as store:
            return await view.look(store, timeout_s=timeout_s)

    state = asyncio.run(looked())
    found = list(view.notes(state, reached.connection))
    quota_bytes = reached.config.etcd.quota_bytes
    if as_json:
        print_values(view.as_values(state, found, quota_bytes=quota_bytes))
    else:
        title = f"{len(state.peers)} members of etcd"
        _print_wide(title, view.COLUMNS, view.rows(state, quota_bytes=quota_bytes))
        _print_notes(found)
    if any(note.wrong for note in found):
        raise typer.Exit(Exit.FAILURE)


@app.command()
def defrag(
    etcd: Etcd = None,
    config: Config = None,
    insecure: Insecure = None,
    member: Annotated[
        str | None, typer.Option("--member", help="Only this member: its name or its id. (each in turn)")
    ] = None,
    compact: Annotated[
        bool,
        typer.Option(
            "--compact", help="Compact first, at the newest revision: drops history; replicas read all again."
        ),
    ] = False,
    stall_all: Annotated[
        bool,
        typer.Option(
            "--stall-all", help="Also if there is only one member: nothing can be written meanwhile."
        ),
    ] = False,
    as_json: Json = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="Seconds within which a member must be back.")
    ] = 60.0,
) -> None:
    """Free unused space in etcd's databases, one member at a time, the leader last.

    A member answers nothing while it is defragmented, so the command refuses if the other healthy voters are no
    quorum. Ctrl-C ends the command once the present member is defragmented. Running it again does no harm.

    Example: strata etcd defrag --compact --etcd e1:2379,e2:2379,e3:2379
    """
    from strata.cli.etcd import defrag  # noqa: PLC0415

    reached, done = _reached(etcd, config, insecure), defrag.Defragmentation()

    def report_freed(freed: defrag.Freed) -> None:
        if not as_json:
            sizes = f"{size(freed.before_bytes)} → {size(freed.after_bytes)}"
            sys.stdout.write(printable(f"{freed.member} {freed.endpoint}: {sizes}") + "\n")
            sys.stdout.flush()

    async def run() -> None:
        async with await reached.open() as store:
            with interruptible() as interrupted:
                await defrag.defragment(
                    store,
                    done,
                    member=member,
                    compact=compact,
                    stall_all=stall_all,
                    timeout_s=timeout_s,
                    interrupted=interrupted,
                    report=_report,
                    report_freed=report_freed,
                )

    try:
        asyncio.run(run())
    finally:
        if as_json:
            print_values(asdict(done))
    if done.interrupted:
        _report(f"interrupted after {len(done.freed)} members; the same command defragments them all")
        raise typer.Exit(INTERRUPTED)
    if done.silent:
        _report(f"left out, for they did not answer: {', '.join(done.silent)}")
        raise typer.Exit(Exit.FAILURE)


@app.command()
def alarm(
    etcd: Etcd = None,
    config: Config = None,
    insecure: Insecure = None,
    disarm: Annotated[
        bool, typer.Option("--disarm", help="Switch off the alarms whose cause is removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List etcd's alarms, or switch them off once their cause is removed.

    NOSPACE goes off if each member's database takes less than 90 % of etcd.quota_bytes. CORRUPT goes off once
    the member that raised it is replaced.

    Example: strata etcd alarm --disarm --etcd e1:2379,e2:2379,e3:2379
    """
    from strata.cli.etcd import (  # noqa: PLC0415
        alarm,
        view,
    )

    reached = _reached(etcd, config, insecure)

    async def run() -> tuple[view.ClusterState, list[alarm.Disarmed], list[StrataError]]:
        async with await reached.open() as store:
            state = await view.look(store)
            if not disarm:
                return state, [], []
            return state, *await alarm.disarm(
                store, state, reached.connection, quota_bytes=reached.config.etcd.quota_bytes
            )

    state, disarmed, refusals = asyncio.run(run())
    if as_json:
        alarms = view.alarm_values(state)
        print_values({"alarms": alarms, "disarmed": [asdict(each) for each in disarmed]})
    elif not disarm:
        _print_alarms(state, reached)
    else:
        for each in disarmed:
            typer.echo(printable(f"alarm {each.alarm} of {each.member} is off"))
        if not state.alarms:
            typer.echo("no alarm is on")
    if refusals:
        raise refusals[0]


def _print_alarms(state: Any, reached: _Reached) -> None:
    from strata.cli.etcd import view  # noqa: PLC0415

    rows = [(each["member"], each["id"], each["alarm"]) for each in view.alarm_values(state)]
    print_table("alarms", ("MEMBER", "ID", "ALARM"), rows, empty="no alarm is on")
    _print_notes(list(view.alarm_notes(state, reached.connection)))


@app.command()
def replace_member(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The lost member: its name, or its id.")],
    peer_url: Annotated[
        str | None,
        typer.Option("--peer-url", help="The new member's peer URL. (the old one's)"),
    ] = None,
    even_if_healthy: Annotated[
        bool, typer.Option("--even-if-healthy", help="Replace a member that is healthy.")
    ] = False,
    etcd: Etcd = None,
    config: Config = None,
    insecure: Insecure = None,
    as_json: Json = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0, help="Seconds to wait until the new one has caught up.")
    ] = 600.0,
) -> None:
    """Replace a member whose disk or host is lost: remove it, add it as a learner, promote it.

    It prints the steps for the new member's host, and waits until they are done. After Ctrl-C or the time
    limit, run the printed command to go on.

    Example: strata etcd replace-member etcd-2 --etcd e1:2379,e2:2379,e3:2379
    """
    from strata.cli.etcd import (  # noqa: PLC0415
        replace_member,
        view,
    )

    reached = _reached(etcd, config, insecure)
    replacement = replace_member.Replacement(name=name)
    deadline = time.monotonic() + timeout_s

    async def run() -> tuple[bool, view.ClusterState | None]:
        async with await reached.open() as store:
            with interruptible() as interrupted:
                await replace_member.begin(
                    store,
                    replacement,
                    peer_url=peer_url,
                    even_if_healthy=even_if_healthy,
                    deadline=time.monotonic() + CHANGE_S,
                    report=_report,
                )
                _print_steps(replacement, to_stderr=as_json)
                await replace_member.finish(
                    store, replacement, deadline=deadline, interrupted=interrupted, report=_report
                )
            return interrupted.is_set(), await replace_member.current_state(store)

    def again() -> str:
        return reached.connection.command(
            "replace-member", replacement.name, "--peer-url", replacement.peer_url
        )

    try:
        interrupted, state = asyncio.run(run())
    except Unavailable as error:
        if replacement.peer_url:  # the old member may have been removed already
            error.hint = f"go on with it: {again()}"
        raise
    if as_json:
        print_values(_replacement_values(replacement))
    if replacement.state == "promoted":
        if not as_json:
            typer.echo(printable(f"{replacement.name} is a voter (member {replacement.added_id:x})"))
            typer.echo(quorum_sentence(state.peers) if state is not None else "etcd does not answer now")
        return
    if interrupted:
        _report(f"interrupted: {replacement.progress}\nthis goes on with it: {again()}")
        raise typer.Exit(INTERRUPTED)
    raise Unavailable(f"after {timeout_s:g} s: {replacement.progress}", hint=f"go on with it: {again()}")


def _replacement_values(replacement: Replacement) -> dict[str, Any]:
    return {
        "name": replacement.name,
        "peer_url": replacement.peer_url,
        "removed_id": f"{replacement.removed_id:x}" if replacement.removed_id else None,
        "added_id": f"{replacement.added_id:x}",
        "resumed": replacement.resumed,
        "state": replacement.state,
        "waiting_for": replacement.progress,
        "environment": replacement.environment(),
    }


def _print_steps(replacement: Replacement, *, to_stderr: bool) -> None:
    """Print the steps to take on the host of the new member."""
    name, settings = replacement.name, replacement.environment()
    lines = [
        f"on the host of {name}: stop it, empty its data directory, and start it with",
        *(f"  {key}={value}" for key, value in settings.items()),
        "with the units of deploy/etcd/systemd:",
        f"  systemctl stop strata-etcd@{name}",
        f"  find /var/lib/strata-etcd/{name} -mindepth 1 -delete",
        f"  write the last three of these settings to the end of /etc/strata/{name}.env",
        f"  systemctl start --no-block strata-etcd@{name}",
        "with deploy/etcd/compose.yaml:",
        f"  docker compose rm -fs {name} && docker volume rm strata_{name}",
        f"  ETCD_INITIAL_CLUSTER_STATE=existing docker compose up -d --no-deps {name}",
    ]
    stream = sys.stderr if to_stderr else sys.stdout
    stream.write("\n".join(map(printable, lines)) + "\n")
    stream.flush()


def _print_wide(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print one table, or two if the terminal is too narrow, both with the members' names."""
    console = Console()
    lines = [columns, *rows]
    needed = sum(max(map(len, column)) for column in zip(*lines, strict=True)) + 2 * (len(columns) - 1)
    if not console.is_terminal or needed <= console.width:
        print_table(title, columns, rows, empty="no member")
        return
    print_table(title, columns[:5], [row[:5] for row in rows], empty="no member")
    typer.echo()
    print_table(
        "their logs and databases", (columns[0], *columns[5:]), [(row[0], *row[5:]) for row in rows], empty=""
    )


def _print_notes(found: list[Note]) -> None:
    for note in found:
        typer.echo(printable(note.says))
        for command in note.commands:
            typer.echo(printable(f"  {command}"))


def _report(text: str) -> None:
    """Write a line of progress to stderr, apart from the command's output."""
    for line in text.splitlines():
        sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()
