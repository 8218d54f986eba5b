"""Check for the modules of the `server` extra, which a coordinator needs."""

from __future__ import annotations

import importlib.util
from typing import Final

from strata.errors import ConfigError

SERVER_MODULES: Final = (
    "grpc_health",
    "grpc_reflection",
    "jinja2",
    "prometheus_client",
    "starlette",
    "uvicorn",
)
"""The modules that a coordinator needs. uvloop, also in the extra, is optional: it saves processor time."""

SERVER_HINT: Final = 'pip install "strata-control[server]"'


def missing_server_modules() -> list[str]:
    """Return the modules that a coordinator needs and that are not installed."""
    return [name for name in SERVER_MODULES if importlib.util.find_spec(name) is None]


def check_server() -> None:
    """Raise `ConfigError`, which names the extra to install, if a module that a coordinator needs is missing."""
    if lacking := missing_server_modules():
        raise ConfigError(f"a coordinator needs {', '.join(lacking)}: not installed here", hint=SERVER_HINT)
