"""The options for credentials and connection, which are the same for every command that connects.

A command takes `credentials: Credentials` and is decorated with `connecting`, which replaces this parameter by the
options. A command that reads the configuration file itself also takes `config`. If the command has the parameters
`endpoints` and `job`, flag, environment and file set these too. If the job does not exist, the error names existing
jobs.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from strata.cli.console.unknown_job import naming_jobs
from strata.config import ClientConfig
from strata.errors import NotFound

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

SETTLED = ("endpoints", "job")
"""Parameters that a file may also set. The default in a command's signature applies if nothing else sets them."""

C = TypeVar("C", bound=Callable[..., Any])


def connecting(command: C) -> C:
    """Give a command the options for credentials, and the values from flags, environment and file."""
    taken = inspect.signature(command, eval_str=True)
    own = [_optional(p) for p in taken.parameters.values() if p.name not in {"credentials", "config"}]
    reads_file = "config" in taken.parameters
    settled = [p.name for p in own if p.name in SETTLED]
    defaults = {p.name: p.default for p in taken.parameters.values() if p.name == "job"}
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in OPTIONS.items()
    ]

    @functools.wraps(command)
    def connected(**given: Any) -> Any:
        path = given.pop("config")
        flags = {f"credentials.{name}": given.pop(name) for name in OPTIONS if name != "config"}
        flags |= {name: given.pop(name) for name in settled}
        found = ClientConfig.load(flags=flags, env=os.environ, path=path, defaults=defaults)
        if "endpoints" in settled:
            given["endpoints"] = ",".join(found.endpoints)
        if "job" in settled:
            given["job"] = found.job
        if reads_file:
            given["config"] = path
        try:
            return command(**given, credentials=found.credentials)
        except NotFound as error:
            if "job" not in settled:
                raise
            raise naming_jobs(error, found) from None

    wrapper: Any = connected
    wrapper.__signature__ = taken.replace(parameters=[*own, *ours])
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *ours)} | {"return": None}
    del wrapper.__wrapped__  # typer would read the wrapped command's type hints
    return wrapper  # type: ignore[no-any-return]  # only typer calls a command


def _optional(parameter: inspect.Parameter) -> inspect.Parameter:
    """Remove the default of a parameter that a file may set: typer would treat the default as the user's choice."""
    if parameter.name not in SETTLED:
        return parameter
    kind, *more = get_args(parameter.annotation)
    return parameter.replace(default=None, annotation=Annotated[kind | None, *more])
