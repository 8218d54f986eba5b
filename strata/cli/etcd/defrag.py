"""`strata etcd defrag`: defragmentation of etcd, one member at a time.

1. Read all members' health; refuse if the other healthy voters are no quorum, since the next member stalls in step 2.
2. Defragment that member: followers first, the leader last.
3. Wait until the member answers and knows a leader again; continue with step 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tenacity import AsyncRetrying, retry_if_exception_type, retry_if_result, wait_fixed

from strata.cli.etcd.view import PROBE_S, ClusterState, look
from strata.core.leadership.etcd_quorum import Peer, may_stall, next_to_defragment, voters
from strata.errors import Refused, Unavailable
from strata.etcd import EtcdStore, MemberStatus

POLL_S: Final = 0.1
SETTLE_S: Final = 0.5
"""A compaction counts as completed once the used size of the database has not shrunk for this long."""
_SHRUNK: Final = 0.99
"""A database still shrinks if its used size is below this ratio of the last measurement. Writes also change the
size a little.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """One defragmented member, with the size of its database before and after."""

    member: str
    endpoint: str
    before_bytes: int
    after_bytes: int


@dataclass(slots=True, kw_only=True)
class Defragmentation:
    """The progress of a defragmentation."""

    compacted_revision: int | None = None
    freed: list[Freed] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Voters that were skipped because they did not answer."""
    interrupted: bool = False


async def defragment(
    store: EtcdStore,
    done: Defragmentation,
    *,
    member: str | None,
    compact: bool,
    stall_all: bool,
    timeout_s: float,
    interrupted: asyncio.Event,
    report: Callable[[str], None],
    report_freed: Callable[[Freed], None],
) -> None:
    """Defragment `member`, or all members; record progress in `done`, which stays valid after an error.

    Raise `Refused` if quorum would be lost, and `Unavailable` if a member does not answer again within `timeout_s`.
    """
    finished: set[int] = set()
    state = await look(store)
    only = state.need(member) if member is not None else None
    if only is not None and only.learner:
        raise Refused(f"{only.label} is a learner, and etcd defragments none", hint="promote it first")
    while (peer := _next(state, only, finished)) is not None:
        judgement = may_stall(peer, state.peers, stall_all=stall_all)
        if not judgement.allowed:
            raise Refused(judgement.reason, hint=_hint(state))
        if compact and done.compacted_revision is None:
            report(f"compacting at revision {state.revision}")
            await store.compact(state.revision, physical_s=timeout_s)
            done.compacted_revision = state.revision
        if interrupted.is_set():
            done.interrupted = True
            return
        if compact:
            await _wait_for_compaction(store, peer, timeout_s)
        report(f"defragmenting {peer.label}; it answers nothing meanwhile")
        before = state.statuses[peer.id].db_bytes
        after = await _defragment_one(store, peer, timeout_s)
        finished.add(peer.id)
        freed = Freed(
            member=peer.label, endpoint=peer.endpoint, before_bytes=before, after_bytes=after.db_bytes
        )
        done.freed.append(freed)
        report_freed(freed)
        state = await look(store)
    done.silent = [p.label for p in voters(state.peers) if p.answer is None and only is None]
    if not done.freed:
        raise Refused(f"{member or 'no voter'} does not answer: it cannot be defragmented", hint=_hint(state))


def _next(state: ClusterState, only: Peer | None, finished: set[int]) -> Peer | None:
    if only is None:
        return next_to_defragment(state.peers, finished)
    return next_to_defragment([peer for peer in state.peers if peer.id == only.id], finished)


def _hint(state: ClusterState) -> str:
    if len(voters(state.peers)) == 1:
        return "pass --stall-all, at a moment when nothing has to be written"
    return "strata etcd status shows the members, and how to repair them"


async def _wait_for_compaction(store: EtcdStore, peer: Peer, timeout_s: float) -> None:
    """Return once the used size of the member's database has stopped shrinking, or after `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            before = math.inf
            while True:
                used = (await store.cluster.status(peer.endpoint, timeout_s=PROBE_S)).db_bytes_in_use
                if used >= _SHRUNK * before:
                    return
                before = used
                await asyncio.sleep(SETTLE_S)


async def _defragment_one(store: EtcdStore, peer: Peer, timeout_s: float) -> MemberStatus:
    """Defragment a member; return its status once it answers and knows a leader again."""
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(Unavailable) | retry_if_result(lambda status: not status.leader_id),
        wait=wait_fixed(POLL_S),
    )
    try:
        await store.cluster.defragment(peer.endpoint, timeout_s=timeout_s)
        async with asyncio.timeout(timeout_s):
            return await retrying(store.cluster.status, peer.endpoint, timeout_s=PROBE_S)
    except (Unavailable, TimeoutError) as error:
        why = error.message if isinstance(error, Unavailable) else "it knows no leader"
        raise Unavailable(
            f"{peer.label} is not back {timeout_s:g} s after its defragmentation began: {why}",
            hint="it may still be at work: look with strata etcd status, then run the same command again",
        ) from error
