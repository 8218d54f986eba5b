"""Monotonic reads: a caller is never answered from a state older than the state it has seen."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from strata.coordinator.view.mirror import Mirror
from strata.core.restore.lineage import THE_WAY_BACK, is_restored, lineage
from strata.errors import ClusterReplaced, ClusterRestored, StrataError, Unavailable
from strata.v1 import common_pb2
from strata.wire import tokens

CATCH_UP_S: Final = 1.0
"""How long a caller waits for a replica that is behind the caller's token; then the caller may try another
replica. This is less than the 2 s that a unary caller waits, and less than the time that a member has after the
loss of its replica (PROTOCOLS 5.4)."""
ASK_S: Final = 0.5
"""How long etcd has to report its revision, once a caller has waited in vain."""


async def honour(mirror: Mirror, token: common_pb2.Token) -> None:
    """Return once the view is at least as new as `token`; a token without a uid sets no minimum (PROTOCOLS 3.3).

    `ClusterReplaced` if the token is of another cluster; `ClusterRestored` if the token is from before a
    restore of this cluster's control plane; `Unavailable` if this replica does not reach the revision in time.
    """
    if not token.uid:
        return
    if token.uid != mirror.uid:
        if is_restored(token.uid, mirror.uid) or token.uid in mirror.replaced:
            raise ClusterRestored(f"the control plane was restored: {token.uid[:64]} is {mirror.uid} now")
        if lineage(token.uid) == lineage(mirror.uid):
            raise Unavailable(
                f"this replica serves cluster {mirror.uid}, which was restored since: {token.uid[:64]}",
                hint="try another replica",
            )
        raise ClusterReplaced(f"the caller knows cluster {token.uid[:64]}, here is {mirror.uid}")
    if token.revision <= mirror.view.revision:
        return
    try:
        async with asyncio.timeout(CATCH_UP_S):
            await mirror.at_least(token.revision)
    except TimeoutError:
        raise Unavailable(await _why_behind(mirror, token), hint="try another replica") from None


async def _why_behind(mirror: Mirror, token: common_pb2.Token) -> str:
    """Return why the view is older than the caller's state. One reason is that etcd itself is older than that state."""
    with contextlib.suppress(StrataError, TimeoutError):
        async with asyncio.timeout(ASK_S):
            revision = await mirror.revision_of_etcd()
            if revision < token.revision:
                return (
                    f"etcd is at revision {revision}, and the caller was at {token.revision}: an older snapshot was put"
                    f" under it; the way back: {THE_WAY_BACK}"
                )
    return f"this replica is at revision {mirror.view.revision}, the caller at {token.revision}"


def stamp(token: common_pb2.Token, mirror: Mirror) -> None:
    """Set the token of an answer to the revision that a reader of this view has now seen."""
    token.uid, token.revision = mirror.uid, mirror.view.revision


def token(mirror: Mirror) -> common_pb2.Token:
    """Return the token for a reader of this view."""
    return tokens.token(mirror.uid, mirror.view.revision)
