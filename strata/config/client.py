"""`ClientConfig` and `LibraryConfig`: the settings of commands and of processes that connect to coordinators."""

# `setting` returns a dataclass field, as `dataclasses.field` does
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from strata.config.credentials import Credentials
from strata.config.loading import load, read_file, setting
from strata.config.userinfo import refuse_userinfo

COORDINATOR_LOGIN: Final = (
    "write host:port; a certificate (tls.cert_file) or a token (auth.token_file) identifies the client"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """The coordinators, the job and the credentials of a command."""

    endpoints: tuple[str, ...] = setting("endpoints", default=("127.0.0.1:50051",), doc="the coordinators")
    job: str = setting("job", default="default", doc="the job to query")
    credentials: Credentials = field(default_factory=Credentials)

    def __post_init__(self) -> None:
        refuse_userinfo("a coordinator's endpoint", self.endpoints, hint=COORDINATOR_LOGIN)

    @classmethod
    def load(
        cls,
        *,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str],
        path: Path | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> ClientConfig:
        """Load the settings from flags, environment, the file at `path` (or a default file), or `defaults`."""
        body, name = read_file(path)
        return load(cls, flags=flags, env=env, file=body, file_name=name, defaults=defaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryConfig:
    """The coordinators, the job and the credentials of a standalone process; by default no coordinators."""

    endpoints: tuple[str, ...] = setting("endpoints", default=(), doc="the coordinators")
    job: str = setting("job", default="default", doc="the job to join, created by its first member")
    credentials: Credentials = field(default_factory=Credentials)

    def __post_init__(self) -> None:
        refuse_userinfo("a coordinator's endpoint", self.endpoints, hint=COORDINATOR_LOGIN)

    @classmethod
    def load(cls, *, env: Mapping[str, str]) -> LibraryConfig:
        """Load the configuration from the environment and `strata.toml`."""
        body, name = read_file(None)
        return load(cls, env=env, file=body, file_name=name)
