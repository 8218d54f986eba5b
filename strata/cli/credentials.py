"""The options that say who we are and whom we trust: the same for every command that connects.

A command that connects takes `credentials: Credentials` and is decorated with `connecting`, which
puts the options in that parameter's place.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from strata.config import Credentials

TlsCaFile = Annotated[
    Path | None,
    typer.Option("--tls-ca-file", help="The authority that signs the other side's certificate."),
]
TlsCertFile = Annotated[Path | None, typer.Option("--tls-cert-file", help="Our certificate.")]
TlsKeyFile = Annotated[Path | None, typer.Option("--tls-key-file", help="Its private key.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="A file with the token to show.")]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Speak plaintext on addresses that are not loopback.")
]
Config = Annotated[Path | None, typer.Option("--config", help="A TOML file.")]

OPTIONS: dict[str, Any] = {
    "ca_file": TlsCaFile,
    "cert_file": TlsCertFile,
    "key_file": TlsKeyFile,
    "token_file": TokenFile,
    "insecure": Insecure,
    "config": Config,
}

C = TypeVar("C", bound=Callable[..., Any])


def connecting(command: C) -> C:
    """Give a command the options of `Credentials`, and what they, environment and file say."""
    taken = inspect.signature(command, eval_str=True)
    own = [p for p in taken.parameters.values() if p.name != "credentials"]
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in OPTIONS.items()
    ]

    @functools.wraps(command)
    def connected(**given: Any) -> Any:
        said = {name: given.pop(name) for name in OPTIONS}
        path = said.pop("config")
        return command(**given, credentials=Credentials.load(flags=said, env=os.environ, path=path))

    wrapper: Any = connected
    wrapper.__signature__ = taken.replace(parameters=[*own, *ours])
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *ours)} | {"return": None}
    del wrapper.__wrapped__  # typer would read the hints of the command inside
    return wrapper  # type: ignore[no-any-return]  # a command is called by typer alone
