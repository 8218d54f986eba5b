"""A fake etcd of three members in memory, for `back_up`. It stores keys as etcd does; its database has a few KiB."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, Self

from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, encode
from strata.core.kv.txn import Put, Range, RangeResult, Txn, TxnResult
from strata.errors import StrataError
from strata.etcd import Alarm, Member, MemberStatus
from strata.testing.memory_store import MemoryStore

UID = "0b6f4a9e2d714c53b8e1f7a2c9d05e36"
KEYS = ClusterKeys("default")
DATABASE = bytes(range(256)) * 512
SNAPSHOT = DATABASE + hashlib.sha256(DATABASE).digest()


class StubEtcd:
    """The result of `connect`: the store and its `cluster` in one. A test sets its answers."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.memory.execute(Txn(success=(Put(key=KEYS.uid, value=encode(ClusterUid(uid=UID))),)))
        self.snapshot_bytes = SNAPSHOT
        self.piece_bytes = 4096
        self.breaks_with: BaseException | None = None
        """The error to raise in the middle of a stream, if any."""
        self.writes_fail_with: StrataError | None = None
        self.alarms_on: tuple[Alarm, ...] = ()
        self.at_snapshot: Callable[[], None] = lambda: None
        """A function that is called before a stream begins."""
        self.requests: list[str] = []
        """The endpoints that received a snapshot request."""
        self.opened = self.closed = 0
        leading = MemberStatus(
            endpoint="h1:2379",
            cluster_id=0xF025,
            member_id=1,
            version="3.5.30",
            leader_id=1,
            raft_term=2,
            raft_index=100,
            revision=2,
            db_bytes=len(DATABASE),
            db_bytes_in_use=len(DATABASE),
            learner=False,
            errors=(),
        )
        self.status: dict[str, MemberStatus | StrataError] = {
            "h1:2379": leading,
            "h2:2379": replace(leading, endpoint="h2:2379", member_id=2),
            "h3:2379": replace(leading, endpoint="h3:2379", member_id=3),
        }

    def begins_anew(self, uid: str) -> None:
        """Replace the keys by those of another cluster, as after a wipe or a restore."""
        self.memory = MemoryStore()
        self.memory.execute(Txn(success=(Put(key=KEYS.uid, value=encode(ClusterUid(uid=uid))),)))

    async def connect(self) -> Any:
        self.opened += 1
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed += 1

    # -- methods of the store

    async def read(self, request: Range) -> RangeResult:
        return self.memory.read(request)

    async def read_at(self, endpoint: str, request: Range) -> RangeResult:
        assert endpoint in self.status
        return self.memory.read(request)

    async def execute(self, txn: Txn) -> TxnResult:
        if self.writes_fail_with is not None:
            raise self.writes_fail_with
        return self.memory.execute(txn)

    # -- methods of the cluster's members

    @property
    def cluster(self) -> Self:
        return self

    async def statuses(self) -> dict[str, MemberStatus | StrataError]:
        return self.status

    async def members(self) -> tuple[Member, ...]:
        return tuple(
            Member(id=n, name=f"etcd-{n}", peer_urls=(), client_urls=(), learner=False) for n in (1, 2, 3)
        )

    async def alarms(self) -> tuple[Alarm, ...]:
        return self.alarms_on

    async def snapshot(self, endpoint: str) -> AsyncGenerator[bytes, None]:
        self.requests.append(endpoint)
        self.at_snapshot()
        for start in range(0, len(self.snapshot_bytes), self.piece_bytes):
            if self.breaks_with is not None and start > 0:
                raise self.breaks_with
            yield self.snapshot_bytes[start : start + self.piece_bytes]
