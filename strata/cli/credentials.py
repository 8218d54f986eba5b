"""The options that say who we are and whom we trust: the same for every command that connects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
