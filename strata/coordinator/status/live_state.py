"""The in-memory state of a replica's jobs, for the status page, the metrics and diagnoses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata.coordinator.reports.progress import Reported
from strata.core.barriers.arrivals import OpenRound
from strata.core.ids import InstanceId
from strata.v1.members_pb2 import MemberDevices, RankEvidence, RankProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """State that only the serving half of a replica has, in memory only, for pages, metrics and diagnoses.

    The state is empty while the replica does not serve.
    """

    session_count: Callable[[], int]
    """Return the number of members and clients that this replica serves."""
    ready_peers: Callable[[], Collection[InstanceId]]
    """Return the peers that reported within the last second that they are ready."""
    open_rounds: Callable[[str], Iterator[OpenRound]]
    """Yield the rounds of a job that this replica knows to be open."""
    progress: Callable[[str, int, Iterable[int]], list[RankProgress]]
    """Return the progress of these ranks of a job's generation; ranks without a report are absent."""
    reported: Callable[[str], tuple[int, Mapping[int, Reported]]]
    """Return the newest generation that ranks of a job reported from, and their reports, or (0, {})."""
    devices: Callable[[str], Iterator[MemberDevices]]
    """Yield the reported accelerators of the job's members, perhaps of departed members too."""
    look: Callable[[str, int | None], None]
    """Record that somebody views a job, or one of its ranks: then `last_seen` and `evidence` are soon available."""
    last_seen: Callable[[str, str, int], float | None]
    """Return when an incarnation of a job's worker was last seen, on the loop's clock; None if unknown."""
    member_ages: Callable[[str], Iterator[tuple[str, float]]]
    """Yield each member of a job that this replica serves, and the seconds since it was last seen."""
    evidence: Callable[[str, int, int], RankEvidence | None]
    """Return the host's recent evidence about a rank of a job's generation, or None."""
    violations: Callable[[str], Sequence[str]]
    """Return the invariants that the job's keys violate."""
