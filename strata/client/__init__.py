"""The client library: sessions, the blocking facade, checkpoints and datasets.

Names are imported when they are first used, so that importing this package imports no grpc.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.client.api.coordinator import CoordinatorClient as CoordinatorClient
    from strata.client.api.datasets import DatasetRegistry as DatasetRegistry
    from strata.client.member_session import MemberSession as MemberSession
    from strata.client.rank.connect import connect as connect
    from strata.client.rank.rank_client import RankClient as RankClient
    from strata.client.rank_session import RankSession as RankSession
    from strata.session.endpoints import Endpoint as Endpoint
    from strata.session.endpoints import parse_endpoints as parse_endpoints
    from strata.session.terms import SessionObserver as SessionObserver

_HOME = {
    "CoordinatorClient": "strata.client.api.coordinator",
    "DatasetRegistry": "strata.client.api.datasets",
    "Endpoint": "strata.session.endpoints",
    "MemberSession": "strata.client.member_session",
    "RankClient": "strata.client.rank.rank_client",
    "RankSession": "strata.client.rank_session",
    "SessionObserver": "strata.session.terms",
    "connect": "strata.client.rank.connect",
    "parse_endpoints": "strata.session.endpoints",
}

__all__ = list(_HOME)  # the one list


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
