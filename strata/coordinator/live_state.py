"""What only the serving half of a replica knows, for whoever looks; nothing of it is written down."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from strata.coordinator.barriers.rounds import Barriers
from strata.coordinator.members.keeper import Keeper
from strata.coordinator.peers.registry import PeerRegistry
from strata.coordinator.reports.interest import Interest
from strata.coordinator.reports.progress import ProgressBoard, Reported
from strata.coordinator.view.invariant_audit import InvariantAudit
from strata.core.barriers import OpenRound
from strata.core.ids import InstanceId
from strata.v1 import members_pb2


class LiveState:
    """A `SoftState`: before a replica serves, and after, there is nothing in it."""

    def __init__(
        self,
        *,
        board: ProgressBoard,
        interest: Interest,
        keeper: Keeper,
        barriers: Barriers,
        peers: PeerRegistry,
        invariants: InvariantAudit,
    ) -> None:
        self._board = board
        self._interest = interest
        self._keeper = keeper
        self._barriers = barriers
        self._peers = peers
        self._invariants = invariants

    def session_count(self) -> int:
        return self._keeper.sessions()

    def ready_peers(self) -> Collection[InstanceId]:
        return self._peers.ready()

    def open_rounds(self, job: str) -> Iterator[OpenRound]:
        return self._barriers.open(job)

    def progress(self, job: str, generation: int, ranks: Iterable[int]) -> list[members_pb2.RankProgress]:
        return self._board.ranks(job, generation, ranks)

    def reported(self, job: str) -> tuple[int, Mapping[int, Reported]]:
        return self._board.reported(job)

    def devices(self, job: str) -> Iterator[members_pb2.MemberDevices]:
        return self._board.devices(job)

    def look(self, job: str, rank: int | None = None) -> None:
        self._interest.look(job, rank)

    def heard(self, job: str, worker: str, incarnation: int) -> float | None:
        return self._board.heard(job, worker, incarnation)

    def evidence(self, job: str, generation: int, rank: int) -> members_pb2.RankEvidence | None:
        return self._board.evidence(job, generation, rank)

    def violations(self, job: str) -> Sequence[str]:
        return self._invariants.violations(job)
