"""`strata tokens`: edits the file of accepted tokens, for clusters without client certificates."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from strata.cli.console.output import Json, print_table, print_values
from strata.core.access.authority import Role
from strata.security.private import write_private
from strata.security.tokens import Entry, TokenFile

app = typer.Typer(help="Make, list and revoke tokens.", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Option(
        "--file", envvar="STRATA_AUTH_ACCEPTED_TOKENS_FILE", help="The file of hashes that coordinators read."
    ),
]


@app.command()
def add(
    file: File,
    role: Annotated[Role, typer.Option("--role", help="Its role.")],
    id: Annotated[  # noqa: A002  # the option's name
        str, typer.Option("--id", help="Its identity: a member's worker id, a coordinator's name.")
    ],
    job: Annotated[
        list[str] | None, typer.Option("--job", help="A job to which it is limited; may be repeated.")
    ] = None,
    days: Annotated[int | None, typer.Option("--days", help="How long it is valid. (until revoked)")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the token to this file, instead of showing it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a token, accept it from now on, and show it once: only its hash is kept.

    Example: strata tokens add --file tokens.json --role member --id node-1 --out node-1.token
    """
    entry, token = TokenFile(file).add(
        role=role, id=id, jobs=tuple(job or ()), now=datetime.now(UTC), days=days
    )
    if out is not None:
        write_private(out, token.encode() + b"\n")
    if as_json:
        where = {"token": token} if out is None else {"file": str(out)}
        print_values({**_as_values(entry), **where})
        return
    if out is None:
        typer.echo(token)
        return
    typer.echo(f"{out}: token {entry.name} of {entry.role} {entry.id}")


@app.command("list")
def list_(file: File, as_json: Json = False) -> None:
    """Show the identities of accepted tokens. The tokens themselves are not stored.

    Example: strata tokens list --file tokens.json
    """
    entries = TokenFile(file).entries()
    if as_json:
        print_values(list(map(_as_values, entries)))
        return
    now = datetime.now(UTC)
    print_table(
        str(file),
        ("TOKEN", "ROLE", "ID", "JOBS", "MADE", "EXPIRES"),
        (
            (
                entry.name,
                entry.role,
                entry.id,
                ", ".join(entry.jobs) or "all",
                entry.created,
                f"{entry.expires or 'never'}{' (EXPIRED)' if entry.expired(now) else ''}",
            )
            for entry in entries
        ),
        empty="no token is accepted",
    )


@app.command()
def revoke(
    file: File,
    token: Annotated[str, typer.Argument(help="The token's name, or its beginning, as `list` shows it.")],
    as_json: Json = False,
) -> None:
    """Revoke a token. Coordinators that read this file refuse the token from the next call on.

    Example: strata tokens revoke --file tokens.json 4f2a91c07d3e
    """
    entry = TokenFile(file).revoke(token)
    if as_json:
        print_values({**_as_values(entry), "revoked": True})
        return
    typer.echo(f"token {entry.name} of {entry.role} {entry.id} is not accepted any more")


def _as_values(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if key != "digest"}
