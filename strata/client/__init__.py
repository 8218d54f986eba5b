"""The client library: sessions, the blocking facade, checkpoints and datasets.

Names are imported when they are first used, so that importing this package imports no grpc.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.client.coordinator import CoordinatorClient as CoordinatorClient
    from strata.client.datasets import DatasetRegistry as DatasetRegistry
    from strata.client.endpoints import Endpoint as Endpoint
    from strata.client.endpoints import parse_endpoints as parse_endpoints
    from strata.client.joining import connect as connect
    from strata.client.member import MemberSession as MemberSession
    from strata.client.rank import RankClient as RankClient
    from strata.client.rank_session import RankSession as RankSession
    from strata.client.terms import SessionObserver as SessionObserver

_HOME = {
    "CoordinatorClient": "coordinator",
    "DatasetRegistry": "datasets",
    "Endpoint": "endpoints",
    "MemberSession": "member",
    "RankClient": "rank",
    "RankSession": "rank_session",
    "SessionObserver": "terms",
    "connect": "joining",
    "parse_endpoints": "endpoints",
}

__all__ = list(_HOME)  # the one list


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
