"""Tokens: the cluster and revision that a caller has seen."""

from __future__ import annotations

from strata.core.ids import Uid
from strata.v1 import common_pb2


def token(uid: Uid, revision: int) -> common_pb2.Token:
    """Return the token of a caller that has seen all of cluster `uid` up to `revision`."""
    return common_pb2.Token(uid=uid, revision=revision)
