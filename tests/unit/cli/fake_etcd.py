"""An etcd of several members for `strata etcd`, without a network; it records its calls in `calls`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from strata.errors import Refused, StrataError, Unavailable
from strata.etcd import Alarm, EtcdStore, Member, MemberStatus

REVISION = 40


class FakeCluster:
    """A fake `Cluster` of members 1, 2, …: the first leads, and those in `silent` do not answer."""

    def __init__(self, members: int = 3, *, silent: tuple[int, ...] = ()) -> None:
        self.silent = set(silent)
        self.leader_id = 1
        self.electing = 0
        """In so many further status calls members know no leader."""
        self.calls: list[str] = []
        self.failing: dict[str, list[StrataError]] = {}
        """The errors of the next calls of a method, one for each call; with `lost`, the call takes effect before its
        error."""
        self.lost = False
        self.alarms_on: list[Alarm] = []
        self.shrinking: dict[int, list[int]] = {}
        """The bytes in use of a member's database, one for each status call; then 0."""
        self.bytes = dict.fromkeys(range(1, members + 1), 1000)
        self.there = {
            number: Member(
                id=number,
                name=f"etcd-{number}",
                peer_urls=(f"http://h{number}:2380",),
                client_urls=(f"http://h{number}:2379",),
                learner=False,
            )
            for number in range(1, members + 1)
        }

    @property
    def store(self) -> EtcdStore:
        """This cluster as the store that commands take."""
        return cast(EtcdStore, FakeStore(self))

    def _fail(self, method: str, effect: Callable[[], object]) -> None:
        """Apply the effect, or raise the next error; after the effect if `lost` is set."""
        if errors := self.failing.get(method):
            if self.lost:
                effect()
            raise errors.pop(0)
        effect()

    async def members(self, *, linearizable: bool = True) -> tuple[Member, ...]:
        return tuple(self.there.values())

    async def statuses(self, *, timeout_s: float | None = None) -> dict[str, MemberStatus | StrataError]:
        found: dict[str, MemberStatus | StrataError] = {}
        if self.electing:
            self.electing -= 1
        for member in self.there.values():
            if member.name:
                found[f"h{member.id}:2379"] = (
                    Unavailable("Connection refused") if member.id in self.silent else self._status(member)
                )
        return found

    async def status(self, endpoint: str, *, timeout_s: float | None = None) -> MemberStatus:
        found = (await self.statuses())[endpoint]
        if isinstance(found, StrataError):
            raise found
        return found

    def _status(self, member: Member) -> MemberStatus:
        return MemberStatus(
            endpoint=f"h{member.id}:2379",
            cluster_id=9,
            member_id=member.id,
            version="3.5.30",
            leader_id=0 if self.electing else self.leader_id,
            raft_term=4,
            raft_index=90,
            revision=REVISION,
            db_bytes=self.bytes.get(member.id, 0),
            db_bytes_in_use=used.pop(0) if (used := self.shrinking.get(member.id)) else 0,
            learner=member.learner,
            errors=(),
        )

    async def alarms(self) -> tuple[Alarm, ...]:
        return tuple(self.alarms_on)

    async def disarm(self, alarm: Alarm) -> None:
        self.alarms_on.remove(alarm)

    async def add(self, peer_url: str, *, learner: bool) -> Member:
        added = Member(id=0xA0, name="", peer_urls=(peer_url,), client_urls=(), learner=learner)
        self.calls.append(f"add {peer_url}")
        self._fail("add", lambda: self.there.update({added.id: added}))
        return added

    def started(self, name: str) -> None:
        """Start the learner under a name."""
        self.there[0xA0] = replace(self.there[0xA0], name=name, client_urls=("http://h160:2379",))

    async def promote(self, member_id: int) -> None:
        self.calls.append(f"promote {member_id:x}")
        voter = replace(self.there[member_id], learner=False)
        self._fail("promote", lambda: self.there.update({member_id: voter}))

    async def remove(self, member_id: int) -> None:
        self.calls.append(f"remove {member_id:x}")
        self._fail("remove", lambda: self.there.pop(member_id, None))

    async def move_leader(self, member_id: int) -> None:
        self.calls.append(f"lead {member_id:x}")
        self.leader_id = member_id

    async def defragment(self, endpoint: str, *, timeout_s: float) -> None:
        number = int(endpoint.removeprefix("h").partition(":")[0])
        self.calls.append(f"defrag {number}")
        self._fail("defragment", lambda: self.bytes.update({number: 100}))


class FakeStore:
    """The part of `EtcdStore` that the commands use."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    async def compact(self, revision: int, *, physical_s: float | None = None) -> None:
        assert physical_s is not None
        self.cluster.calls.append(f"compact {revision}")


NOT_IN_SYNC = Refused(
    "etcd h1:2379: etcdserver: can only promote a learner member which is in sync with leader"
)
