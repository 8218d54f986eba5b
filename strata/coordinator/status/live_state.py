"""What a replica knows of its jobs and does not write down: the status page, the metrics and diagnoses ask for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata.coordinator.reports.progress import Reported
from strata.core.barriers.arrivals import OpenRound
from strata.core.ids import InstanceId
from strata.v1.members_pb2 import MemberDevices, RankEvidence, RankProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftState:
    """What only the serving half of a replica knows, for whoever looks; nothing of it is written down.

    Before a replica serves, and after, there is nothing in it.
    """

    session_count: Callable[[], int]
    """Return how many members and clients this replica serves."""
    ready_peers: Callable[[], Collection[InstanceId]]
    """Return the peers that said within the last second that they are ready."""
    open_rounds: Callable[[str], Iterator[OpenRound]]
    """Yield the rounds of a job that are open as far as is known here."""
    progress: Callable[[str, int, Iterable[int]], list[RankProgress]]
    """Return what is known of these ranks of a job's generation; those that said nothing are absent."""
    reported: Callable[[str], tuple[int, Mapping[int, Reported]]]
    """Return the newest generation that ranks of a job reported from, and their reports; 0 and none if none did."""
    devices: Callable[[str], Iterator[MemberDevices]]
    """Yield what is known of the accelerators of the job's members, gone ones perhaps included."""
    look: Callable[[str, int | None], None]
    """Take note that somebody looks at a job, or at one of its ranks: then `heard` and `evidence` are known soon."""
    heard: Callable[[str, str, int], float | None]
    """Return when an incarnation of a job's worker was last heard, on the loop's clock; None if that is not known."""
    member_ages: Callable[[str], Iterator[tuple[str, float]]]
    """Yield each member of a job that this replica serves, and the seconds since it was last heard."""
    evidence: Callable[[str, int, int], RankEvidence | None]
    """Return what its host saw of a rank of a job's generation lately; None if that is not known."""
    violations: Callable[[str], Sequence[str]]
    """Return what the job's keys say and cannot be."""
