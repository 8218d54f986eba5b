"""`strata etcd replace-member`: replacement of a lost etcd member.

    1. Read the members' health; refuse if the named member is healthy, or if the others are no quorum.
    2. Remove the named member.
    3. Add the member again, at its peer URL, as a learner: a learner has no vote, so the quorum does not grow.
    4. The operator starts the learner on its host with an empty data directory.
    5. Wait until the learner has started and caught up; promote it.

A second run finds the learner that the first run added, and continues with step 5. A learner that has not started has
no name, so only `--peer-url` finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from strata.cli.console.interrupts import paused
from strata.cli.etcd.view import ClusterState, look
from strata.config.userinfo import refuse_userinfo
from strata.core.leadership.etcd_quorum import (
    Peer,
    electing,
    healthy_voters,
    leader_id,
    may_add,
    may_remove,
    unhealthy_reason,
    voters,
)
from strata.errors import ConfigError, NotFound, Refused, StrataError, Unavailable
from strata.etcd import EtcdStore, Member

POLL_S: Final = 0.5
REPORT_EVERY_S: Final = 10.0
ELECTION_S: Final = 10.0
"""How long to wait for etcd to elect a leader before judging which members are healthy."""
_NOT_YET: Final = ("can only promote a learner member", "not enough started members")
"""etcd's errors if a learner is not in sync with the leader yet, or if the member is a voter already."""
_UNSETTLED: Final = "unhealthy cluster"
"""etcd's error while its members have not been connected for 5 s."""


@dataclass(slots=True, kw_only=True)
class Replacement:
    """The progress of a member's replacement."""

    name: str
    peer_url: str = ""
    removed_id: int = 0
    """Id of the member that this run removed; 0 if an earlier run removed the member."""
    added_id: int = 0
    resumed: bool = False
    initial_cluster: str = ""
    state: str = "looking"
    """One of looking, added, started, promoted."""
    progress: str = ""
    """The condition that the command waits for, as text."""

    def environment(self) -> dict[str, str]:
        """Return etcd's settings for the first start of the new member."""
        return {
            "ETCD_NAME": self.name,
            "ETCD_INITIAL_CLUSTER": self.initial_cluster,
            "ETCD_INITIAL_CLUSTER_STATE": "existing",
            "ETCD_INITIAL_ADVERTISE_PEER_URLS": self.peer_url,
        }


async def begin(
    store: EtcdStore,
    replacement: Replacement,
    *,
    peer_url: str | None,
    even_if_healthy: bool,
    deadline: float,
    report: Callable[[str], None],
) -> None:
    """Do steps 1 to 3, unless an earlier run did them. Ctrl-C does not interrupt them halfway."""
    name = replacement.name
    if peer_url is not None:
        _check_url(peer_url)
    state = await _led(store)
    learner = _learner(state, name, peer_url)
    if learner is None:
        target = state.find(name)
        if target is not None:
            replacement.name = target.name or name
            replacement.peer_url = peer_url or _peer_url(state.members[target.id])
            await _remove(store, state, target, replacement, even_if_healthy, deadline, report)
        else:
            if peer_url is None and (waiting := _unstarted(state)) is not None:
                raise NotFound(
                    f"no member is named {name}",
                    hint=f"if learner {waiting.id:x}, which has not started, is to be {name}:"
                    f" --peer-url {waiting.peer_urls[0]}",
                )
            judgement = may_add(name, state.peers)
            if not judgement.allowed:
                raise NotFound(judgement.reason, hint="strata etcd status shows the members")
            if peer_url is None:
                raise NotFound(
                    f"{name} is no member any more, and its peer URL is not known",
                    hint="pass it with --peer-url, to add it again as a learner",
                )
            replacement.peer_url = peer_url
        learner = await _add(store, replacement.peer_url, deadline, report)
    else:
        replacement.resumed = True
        replacement.peer_url = learner.peer_urls[0]
    replacement.added_id, replacement.state = learner.id, "added"
    replacement.initial_cluster = ",".join(
        sorted(_initial_cluster(await store.cluster.members(), replacement))
    )


async def _led(store: EtcdStore) -> ClusterState:
    """Return the cluster's state after any election in progress: the lost member may have been the leader."""
    deadline = time.monotonic() + ELECTION_S
    state = await look(store)
    while electing(state.peers) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
        state = await look(store)
    return state


def _learner(state: ClusterState, name: str, peer_url: str | None) -> Member | None:
    """Return the learner of an earlier run, found by name or, before its start, by peer URL; else None."""
    learners = [state.members[peer.id] for peer in state.peers if peer.learner]
    for member in learners:
        if name in {member.name, f"{member.id:x}"}:
            return member
    if any(peer.name == name for peer in state.peers):
        return None
    for member in learners:
        if not member.name and peer_url in member.peer_urls:
            return member
    return None


def _unstarted(state: ClusterState) -> Member | None:
    learners = (state.members[peer.id] for peer in state.peers if peer.learner)
    return next((member for member in learners if not member.name), None)


def _peer_url(member: Member) -> str:
    if len(member.peer_urls) != 1:
        raise Refused(
            f"{member.name} has {len(member.peer_urls)} peer URLs",
            hint="pass the one to keep with --peer-url",
        )
    return member.peer_urls[0]


def _check_url(url: str) -> None:
    refuse_userinfo("a peer URL", (url,), hint="write http(s)://host:port")
    scheme, separator, rest = url.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme not in {"http", "https"} or not (separator and host and colon and port.isdecimal()):
        raise ConfigError(f"--peer-url: {url!r} is no peer URL", hint="write http(s)://host:port")


def _initial_cluster(members: tuple[Member, ...], replacement: Replacement) -> Iterator[str]:
    for member in members:
        name = replacement.name if member.id == replacement.added_id else member.name or f"{member.id:x}"
        yield from (f"{name}={url}" for url in member.peer_urls)


async def _remove(
    store: EtcdStore,
    state: ClusterState,
    target: Peer,
    replacement: Replacement,
    even_if_healthy: bool,
    deadline: float,
    report: Callable[[str], None],
) -> None:
    judgement = may_remove(target, state.peers, even_if_healthy=even_if_healthy)
    if not judgement.allowed:
        raise Refused(judgement.reason, hint="strata etcd status shows the members")
    if other := [peer for peer in state.peers if peer.learner and peer.id != target.id]:
        raise Refused(
            f"{other[0].label} is a learner already, and etcd allows one",
            hint=f"finish that first: strata etcd replace-member {other[0].label}",
        )
    if target.id == leader_id(state.peers) and target.answer is not None:
        heir = next(peer for peer in healthy_voters(state.peers) if peer.id != target.id)
        report(f"{target.label} leads: handing over to {heir.label}")
        await store.cluster.move_leader(heir.id)
    while True:
        try:
            await store.cluster.remove(target.id)
        except Unavailable as error:
            await _retry_pause(error, deadline)
        if target.id not in {member.id for member in await store.cluster.members()}:
            break
    replacement.removed_id = target.id
    report(f"removed {target.label} (member {target.id:x})")


async def _add(store: EtcdStore, peer_url: str, deadline: float, report: Callable[[str], None]) -> Member:
    """Add the learner and return it. If the outcome of a request is unknown, look for the learner before a retry."""
    reported = ""
    while True:
        try:
            added = await store.cluster.add(peer_url, learner=True)
        except Unavailable as error:
            found = [m for m in await store.cluster.members() if peer_url in m.peer_urls]
            if found:
                added = found[0]
            else:
                if _UNSETTLED in error.message and (why := await _refusal_reason(store)) != reported:
                    report(f"waiting: {why}")
                    reported = why
                await _retry_pause(Unavailable(reported or error.message), deadline)
                continue
        report(f"added learner {added.id:x} at {peer_url}")
        return added


async def _retry_pause(error: Unavailable, deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise error
    await asyncio.sleep(POLL_S)


async def _refusal_reason(store: EtcdStore) -> str:
    """Return why etcd refuses an addition: etcd requires that all voters have been connected for 5 s."""
    state = await look(store)
    sick = [peer.label for peer in voters(state.peers) if unhealthy_reason(peer, state.peers)]
    if sick:
        return f"etcd does not add a member while {', '.join(sick)} is not connected: start or replace that one first"
    return "etcd does not add a member before all voters were connected for 5 s"


async def finish(
    store: EtcdStore,
    replacement: Replacement,
    *,
    deadline: float,
    interrupted: asyncio.Event,
    report: Callable[[str], None],
) -> None:
    """Do step 5: return once the new member is `promoted`, at Ctrl-C, or at the deadline.

    Raise `Refused` if another operator removed the learner meanwhile.
    """
    reported, next_report = "", 0.0
    while True:
        replacement.progress = await _promote(store, replacement)
        if replacement.state == "promoted":
            return
        now = time.monotonic()
        if replacement.progress != reported or now >= next_report:
            report(f"waiting: {replacement.progress}")
            reported, next_report = replacement.progress, now + REPORT_EVERY_S
        if interrupted.is_set() or now >= deadline:
            return
        await paused(interrupted, min(POLL_S, deadline - now))


async def _promote(store: EtcdStore, replacement: Replacement) -> str:
    """Promote the learner if it is in sync; otherwise return the condition to wait for."""
    try:
        members = {member.id: member for member in await store.cluster.members()}
        learner = members.get(replacement.added_id)
        if learner is None:
            raise Refused(
                f"learner {replacement.added_id:x} was removed meanwhile", hint="strata etcd status"
            )
        if not learner.learner:
            replacement.state = "promoted"
            return ""
        if not learner.name:
            return f"{replacement.name} is not started yet at {replacement.peer_url}"
        replacement.state = "started"
        await store.cluster.promote(learner.id)
    except Unavailable as error:
        return f"etcd did not answer: {error.message}"
    except Refused as error:
        if not any(text in error.message for text in _NOT_YET):
            raise
        return f"{replacement.name} has started, and reads the data of the others"
    replacement.state = "promoted"
    return ""


async def current_state(store: EtcdStore) -> ClusterState | None:
    """Return the cluster's current state; None if it cannot be read."""
    try:
        return await look(store)
    except StrataError:
        return None
