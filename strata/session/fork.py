"""Refuse the use of this library in a process that was forked from a process using it.

A forked child closes the socket to the agent (`strata.session.framed`), and has none of the threads that run the
session. Unary calls (`CoordinatorClient`, `DatasetRegistry`, `ShardManager`) use gRPC in the process itself. With
grpc.aio in a thread, gRPC's own fork handlers crash a forked child such as a DataLoader worker. So the fork
handlers must be off (`GRPC_ENABLE_FORK_SUPPORT=0`, set by `strata/__init__.py` before grpc is imported).
"""

from __future__ import annotations

import gc
import os
from typing import Final

from strata.errors import ConfigError

_SETTING: Final = "GRPC_ENABLE_FORK_SUPPORT"

_user: int | None = None
_forked_from: int | None = None


def check_import_order() -> None:
    """Raise `ConfigError` if grpc was imported with its fork handlers on."""
    if os.environ.get(_SETTING, "").lower() not in {"0", "false"}:
        raise ConfigError(
            f"grpc was imported before strata, and {_SETTING} is not 0:"
            " a forked child (a DataLoader worker) would crash",
            hint=f"import strata before grpc, or set {_SETTING}=0 in the environment",
        )


def allow_grpc() -> None:
    """Raise `ConfigError` unless grpc may be used here; from now on, children forked from this process are refused."""
    check_import_order()
    claim()


def claim() -> None:
    """Raise `ConfigError` in a child that was forked after `claim`; from now on, refuse children forked from this
    process.
    """
    global _user  # noqa: PLW0603  # a fact about the process
    refuse_in_child()
    _user = os.getpid()


def refuse_in_child() -> None:
    """Raise `ConfigError` in a process forked from one that uses this library."""
    if _forked_from is not None:
        raise ConfigError(
            f"process {os.getpid()} was forked from {_forked_from}, whose connection to the"
            " coordinators it cannot use",
            hint="call Strata in the parent; a child that is started by 'spawn' or 'forkserver' may connect by itself,"
            " unless its parent is a rank of an agent",
        )


def _after_in_child() -> None:
    global _forked_from  # noqa: PLW0603  # a fact about the process
    if _user is not None:
        _forked_from = _user
        # no garbage collection of grpc.aio's last object: it would wait for a thread that the child does not have
        gc.freeze()


os.register_at_fork(after_in_child=_after_in_child)
