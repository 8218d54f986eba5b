"""`Credentials`: this process's certificates and tokens, and its CA; servers and clients have the same settings."""

# ruff: noqa: RUF009  # `setting` returns a dataclass field, as `dataclasses.field` does
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.config.loading import load, read_file, setting
from strata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials that a client presents, and the CA that it trusts; a coordinator is a client of its peers.

    The files are read again for every connection, so they may be replaced at any time.
    """

    ca_file: Path | None = setting(
        "tls.ca_file", default=None, doc="the authority that signs the other side's certificate"
    )
    cert_file: Path | None = setting("tls.cert_file", default=None, doc="our certificate")
    key_file: Path | None = setting("tls.key_file", default=None, doc="its private key, mode 0600")
    token_file: Path | None = setting(
        "auth.token_file", default=None, doc="file with the token that we show, mode 0600"
    )
    insecure: bool = setting(
        "insecure", default=False, doc="speak plaintext on addresses that are not loopback"
    )

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError(
                "tls.cert_file and tls.key_file need each other", hint="set both, or neither of them"
            )

    @property
    def wants_tls(self) -> bool:
        """Whether to use TLS for an endpoint without a scheme."""
        return self.ca_file is not None or self.cert_file is not None

    @classmethod
    def load(
        cls, *, flags: Mapping[str, Any] | None = None, env: Mapping[str, str], path: Path | None = None
    ) -> Credentials:
        """Load the credentials from flags, environment and the file at `path` (or a default file)."""
        body, name = read_file(path)
        return load(cls, flags=flags, env=env, file=body, file_name=name)
