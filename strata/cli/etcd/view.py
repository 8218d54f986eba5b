"""State of an etcd cluster for `strata etcd`: members, health, alarms; its tables, notes and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from strata.cli.etcd.remedies import Connection, corrupt_remedy, no_space_remedy, replacement_command
from strata.core.leadership.etcd_quorum import (
    Answer,
    Peer,
    findings,
    healthy_voters,
    leader_id,
    may_remove,
    quorum,
    quorum_sentence,
    role,
    unhealthy_reason,
    voters,
)
from strata.errors import NotFound, Refused, StrataError
from strata.etcd import Alarm, EtcdStore, Member, MemberStatus
from strata.observe.words import size

PROBE_S: Final = 3.0
"""How long one member may take to report its status."""
NO_SPACE: Final = "NOSPACE"
CORRUPT: Final = "CORRUPT"
COLUMNS: Final = (
    "MEMBER",
    "ENDPOINT",
    "ID",
    "VERSION",
    "ROLE",
    "TERM",
    "INDEX",
    "REVISION",
    "DATABASE",
    "ALARMS",
)

_ALARM_TEXT = re.compile(r"memberID:(\d+) alarm:(\w+)")
_NO_LEADER_TEXT: Final = "no leader"
_SHORT: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """A cluster at one moment, as its members report it."""

    peers: tuple[Peer, ...]
    members: Mapping[int, Member]
    statuses: Mapping[int, MemberStatus]
    alarms: tuple[Alarm, ...]
    unmatched: Mapping[str, str] = field(default_factory=dict)
    """Endpoints that no member advertises and that did not answer, with the reason."""

    def find(self, name: str) -> Peer | None:
        """Return the member with this name or this hexadecimal id; raise `Refused` if several members match."""
        found = [peer for peer in self.peers if name in {peer.name, f"{peer.id:x}"}]
        if len(found) > 1:
            ids = ", ".join(f"{peer.id:x}" for peer in found)
            raise Refused(f"{len(found)} members are named {name}", hint=f"give the id of one: {ids}")
        return found[0] if found else None

    def need(self, name: str) -> Peer:
        """Return the member as `find` does, but raise `NotFound` if no member matches."""
        if (peer := self.find(name)) is not None:
            return peer
        members = ", ".join(peer.label for peer in self.peers)
        raise NotFound(f"no member is named {name}", hint=f"the members are {members}")

    def label(self, member_id: int) -> str:
        """Return the name of a member; for an id that is no member any more, the id."""
        return next((peer.label for peer in self.peers if peer.id == member_id), f"{member_id:x}")

    @property
    def revision(self) -> int:
        """The newest revision of any member."""
        return max((status.revision for status in self.statuses.values()), default=0)


async def look(store: EtcdStore, *, timeout_s: float = PROBE_S) -> ClusterState:
    """Read each endpoint's status, and the cluster's members and alarms."""
    answers = await store.cluster.statuses(timeout_s=timeout_s)
    statuses = {s.member_id: s for s in answers.values() if isinstance(s, MemberStatus)}
    silent = {name: why for name, why in answers.items() if isinstance(why, StrataError)}
    led = any(status.leader_id for status in statuses.values())
    members = await _members(store, linearizable=led)
    alarms = await _alarms(store, statuses, led=led)
    corrupt = {alarm.member_id for alarm in alarms if alarm.kind == CORRUPT}
    peers = tuple(
        sorted(
            (_peer(member, statuses.get(member.id), silent, corrupt) for member in members),
            key=lambda peer: (not peer.name, peer.label),
        )
    )
    ours = {peer.endpoint for peer in peers}
    return ClusterState(
        peers=peers,
        members={member.id: member for member in members},
        statuses=statuses,
        alarms=alarms,
        unmatched={name: short(why, name) for name, why in silent.items() if name not in ours},
    )


async def _members(store: EtcdStore, *, linearizable: bool) -> tuple[Member, ...]:
    if linearizable:
        try:
            return await store.cluster.members()
        except StrataError as error:
            if not error.retryable:
                raise
    return await store.cluster.members(linearizable=False)


async def _alarms(store: EtcdStore, statuses: Mapping[int, MemberStatus], *, led: bool) -> tuple[Alarm, ...]:
    """Return the alarms; without a quorum, those in the members' statuses."""
    if led:
        try:
            return await store.cluster.alarms()
        except StrataError as error:
            if not error.retryable:
                raise
    texts = {text for status in statuses.values() for text in status.errors}
    named = [found.groups() for text in sorted(texts) if (found := _ALARM_TEXT.search(text))]
    return tuple(Alarm(member_id=int(member), kind=kind) for member, kind in named)


def _peer(
    member: Member, status: MemberStatus | None, silent: Mapping[str, StrataError], corrupt: set[int]
) -> Peer:
    addresses = [url.partition("://")[2] for url in member.client_urls]
    endpoint, silence, answer = "", "", None
    if status is not None:
        endpoint = status.endpoint
        answer = Answer(
            leader_id=status.leader_id,
            raft_term=status.raft_term,
            errors=tuple(e for e in status.errors if not _ALARM_TEXT.search(e) and _NO_LEADER_TEXT not in e),
        )
    elif (known := next((address for address in addresses if address in silent), None)) is not None:
        endpoint, silence = known, short(silent[known], known)
    return Peer(
        id=member.id,
        name=member.name,
        learner=member.learner,
        address=addresses[0] if addresses else "",
        endpoint=endpoint,
        answer=answer,
        silence=silence,
        corrupt=member.id in corrupt,
    )


def short(error: StrataError, endpoint: str) -> str:
    """Return briefly why an endpoint did not answer."""
    text = error.message.removeprefix(f"etcd {endpoint}: ")
    if "DEADLINE_EXCEEDED" in text:
        return "no answer in time"
    if "Connection refused" in text:
        return "connection refused"
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


# -- output -------------------------------------------------------------------------------------


def rows(state: ClusterState, *, quota_bytes: int) -> list[tuple[str, ...]]:
    """Return a row for each member, and for each endpoint that belongs to no known member."""
    newest = max((status.raft_index for status in state.statuses.values()), default=0)
    table = [_row(peer, state, newest, quota_bytes) for peer in state.peers]
    table += [
        ("?", endpoint, "-", "-", f"silent: {why}", "-", "-", "-", "-", "-")
        for endpoint, why in state.unmatched.items()
    ]
    return table


def _row(peer: Peer, state: ClusterState, newest: int, quota_bytes: int) -> tuple[str, ...]:
    alarms = ", ".join(alarm.kind for alarm in state.alarms if alarm.member_id == peer.id) or "-"
    does = role(peer, state.peers)
    status = state.statuses.get(peer.id)
    if status is None:
        why = "not started yet" if not peer.address else peer.silence
        does_and_why = f"{does}: {why}" if why else does
        unseen = ("-",) * 4
        return (
            peer.label,
            peer.endpoint or peer.address or "-",
            f"{peer.id:x}",
            "-",
            does_and_why,
            *unseen,
            alarms,
        )
    behind = newest - status.raft_index
    return (
        peer.label,
        peer.endpoint,
        f"{peer.id:x}",
        status.version,
        does,
        str(status.raft_term),
        f"{status.raft_index} (-{behind})" if behind else str(status.raft_index),
        str(status.revision),
        f"{size(status.db_bytes_in_use)} of {size(status.db_bytes)}, {100 * status.db_bytes / quota_bytes:.0f} %",
        alarms,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence about a fault, printed below the table, and the commands that remedy the fault."""

    says: str
    wrong: bool = False
    commands: tuple[str, ...] = ()


def notes(state: ClusterState, connection: Connection) -> Iterator[Note]:
    """Yield the notes for an operator: quorum, faults, and the commands that remedy them."""
    peers = state.peers
    yield Note(says=quorum_sentence(peers))
    if not leader_id(peers):
        yield Note(says=findings(peers)[0], wrong=True)
    for peer in voters(peers):
        if not (reason := unhealthy_reason(peer, peers)) or peer.corrupt:
            continue
        lost = peer.answer is None and may_remove(peer, peers).allowed
        yield Note(
            says=f"{peer.label} {reason}"
            + ("; start it, or if its disk or its host is lost:" if lost else ""),
            wrong=True,
            commands=(replacement_command(connection, peer.label),) if lost else (),
        )
    yield from (_learner_note(peer, state, connection) for peer in peers if peer.learner)
    yield from alarm_notes(state, connection)


def _learner_note(peer: Peer, state: ClusterState, connection: Connection) -> Note:
    if peer.name:
        says = f"{peer.name} is a learner, without a vote; this makes it a voter:"
        return Note(says=says, commands=(connection.command("replace-member", peer.name),))
    url = state.members[peer.id].peer_urls[0]
    says = f"a learner is not started yet at {url}; this goes on with it, NAME being that of the lost member:"
    return Note(says=says, commands=(connection.command("replace-member", "NAME", "--peer-url", url),))


def alarm_notes(state: ClusterState, connection: Connection) -> Iterator[Note]:
    """Yield a sentence for each kind of alarm, with the commands that clear it."""
    kinds = {alarm.kind: [a for a in state.alarms if a.kind == alarm.kind] for alarm in state.alarms}
    for kind, alarms in sorted(kinds.items()):
        raised = ", ".join(state.label(alarm.member_id) for alarm in alarms)
        if kind == NO_SPACE:
            says = (
                f"etcd takes no writes: its quota is used up (alarm NOSPACE of {raised}); run in this order:"
            )
            yield Note(
                says=says, wrong=True, commands=no_space_remedy(connection, voters=len(voters(state.peers)))
            )
        elif kind == CORRUPT:
            there = [peer.label for peer in state.peers if peer.corrupt]
            says = f"the data of {raised} differs from the others' (alarm CORRUPT); run in this order:"
            yield Note(says=says, wrong=True, commands=corrupt_remedy(connection, there))
        else:
            yield Note(says=f"{raised} raises the alarm {kind}", wrong=True)


def as_values(state: ClusterState, found: list[Note], *, quota_bytes: int) -> dict[str, Any]:
    """Return the document that `strata etcd status --json` prints."""
    newest = max((status.raft_index for status in state.statuses.values()), default=0)
    return {
        "healthy": not any(note.wrong for note in found),
        "voters": len(voters(state.peers)),
        "healthy_voters": len(healthy_voters(state.peers)),
        "quorum": quorum(len(voters(state.peers))),
        "quota_bytes": quota_bytes,
        "members": [_member_values(peer, state, newest) for peer in state.peers],
        "unmatched": dict(state.unmatched),
        "alarms": alarm_values(state),
        "notes": [{"says": n.says, "wrong": n.wrong, "commands": list(n.commands)} for n in found],
    }


def alarm_values(state: ClusterState) -> list[dict[str, str]]:
    """Return the alarms for JSON."""
    return [
        {"member": state.label(alarm.member_id), "id": f"{alarm.member_id:x}", "alarm": alarm.kind}
        for alarm in state.alarms
    ]


def _member_values(peer: Peer, state: ClusterState, newest: int) -> dict[str, Any]:
    status = state.statuses.get(peer.id)
    shown: dict[str, Any] = {
        "name": peer.name,
        "id": f"{peer.id:x}",
        "endpoint": peer.endpoint or peer.address,
        "peer_urls": list(state.members[peer.id].peer_urls),
        "role": role(peer, state.peers),
        "learner": peer.learner,
        "unhealthy_reason": unhealthy_reason(peer, state.peers),
        "silence": peer.silence,
    }
    if status is not None:
        shown |= {
            "version": status.version,
            "raft_term": status.raft_term,
            "raft_index": status.raft_index,
            "behind": newest - status.raft_index,
            "revision": status.revision,
            "db_bytes": status.db_bytes,
            "db_bytes_in_use": status.db_bytes_in_use,
        }
    return shown
