"""The source of a snapshot: chooses the etcd member to copy from, and first checks which cluster the member holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, decode
from strata.core.kv.txn import Range, prefix_end
from strata.core.restore.backup_source import Candidate, choose_member
from strata.errors import Conflict, NotFound, Refused, StrataError, Unavailable
from strata.etcd import EtcdStore, MemberStatus

CORRUPT: Final = "CORRUPT"
_CLUSTERS: Final = "/strata/v1/"
_NAMED: Final = 5
"""Number of etcd's clusters that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A healthy member, and the minimum `revision` of its snapshot."""

    endpoint: str
    member: str
    reason: str
    """Why this member was chosen, in a sentence."""
    version: str
    etcd_cluster_id: str
    revision: int
    uid: str
    uid_value: bytes
    """The value of `P/uid`, compared when the backup is recorded."""
    database_bytes: int
    """Estimate of the snapshot's size, for the progress display."""


async def find_source(store: EtcdStore, keys: ClusterKeys) -> Source:
    """Return the member to back up `keys.cluster` from.

    `Unavailable` says of each endpoint why it cannot give a snapshot. `NotFound` if etcd does not hold that cluster.
    `Refused` if this user may not read the members' status.
    """
    statuses = await store.cluster.statuses()
    for status in statuses.values():
        if isinstance(status, Refused):
            raise Refused(
                f"a backup needs an etcd user with the role root: {status.message}",
                hint="name one in etcd.username and etcd.password_file",
            )
    answering = {name: status for name, status in statuses.items() if isinstance(status, MemberStatus)}
    names: dict[int, str] = {}
    corrupt: frozenset[int] = frozenset()
    if any(status.leader_id for status in answering.values()):  # no leader: etcd answers neither call below
        names = {member.id: member.name for member in await store.cluster.members()}
        alarms = await store.cluster.alarms()
        corrupt = frozenset(alarm.member_id for alarm in alarms if alarm.kind == CORRUPT)
    choice = choose_member(_candidates(statuses, names, corrupt))
    if choice.endpoint is None:
        raise Unavailable(
            f"no etcd member can give a snapshot: {choice.reason}",
            hint="strata doctor --etcd checks more; a majority of the members must run",
        )
    status = answering[choice.endpoint]
    # the member answers once it has applied all earlier commits, so its snapshot holds at least this revision
    found = await store.read_at(choice.endpoint, Range(key=keys.uid))
    if not found.kvs:
        raise NotFound(
            f"etcd holds no cluster {keys.cluster}", hint=_named(await _clusters(store), keys.cluster)
        )
    value = found.kvs[0].value
    return Source(
        endpoint=choice.endpoint,
        member=names.get(status.member_id) or f"{status.member_id:x}",
        reason=choice.reason,
        version=status.version,
        etcd_cluster_id=f"{status.cluster_id:x}",
        revision=found.revision,
        uid=decode(ClusterUid, value).uid,
        uid_value=value,
        database_bytes=status.db_bytes,
    )


async def check_unchanged(store: EtcdStore, keys: ClusterKeys, source: Source) -> None:
    """Return if etcd still holds the cluster it held before the snapshot; `Conflict` if not.

    A uid is never reused, so etcd held this cluster during the whole snapshot.
    """
    found = (await store.read(Range(key=keys.uid))).kvs
    if found and found[0].value == source.uid_value:
        return
    now = (
        f"etcd holds {decode(ClusterUid, found[0].value).uid}"
        if found
        else f"etcd holds no cluster {keys.cluster}"
    )
    raise Conflict(
        f"cluster {keys.cluster} changed while its snapshot was taken: it was {source.uid}, and {now} now",
        hint="a restore is going on: make the backup again once it is done",
    )


def _candidates(
    statuses: Mapping[str, MemberStatus | StrataError], names: Mapping[int, str], corrupt: frozenset[int]
) -> list[Candidate]:
    found = []
    for endpoint, status in statuses.items():
        if isinstance(status, StrataError):
            why = status.message.removeprefix(f"etcd {endpoint}: ")
            found.append(Candidate(endpoint=endpoint, error=f"it does not answer ({why})"))
            continue
        found.append(
            Candidate(
                endpoint=endpoint,
                member=names.get(status.member_id) or f"{status.member_id:x}",
                leads=status.leader_id == status.member_id,
                knows_leader=status.leader_id != 0,
                learner=status.learner,
                corrupt=status.member_id in corrupt,
                raft_index=status.raft_index,
            )
        )
    return found


async def _clusters(store: EtcdStore) -> list[str]:
    """Return the names of the clusters in etcd, at most one more than are shown, with one read for each."""
    names: list[str] = []
    after = _CLUSTERS
    while len(names) <= _NAMED:
        read = Range(key=after, range_end=prefix_end(_CLUSTERS), limit=1, keys_only=True)
        found = await store.read(read)
        if not found.kvs:
            break
        name = found.kvs[0].key.removeprefix(_CLUSTERS).partition("/")[0]
        names.append(name)
        after = prefix_end(f"{_CLUSTERS}{name}/")
    return names


def _named(names: list[str], wanted: str) -> str:
    if not names:
        return "no coordinator has ever started there: is it the right etcd?"
    shown = ", ".join(names[:_NAMED]) + (" and more" if len(names) > _NAMED else "")
    return f"it holds {shown}: --cluster names one" if wanted not in names else ""
